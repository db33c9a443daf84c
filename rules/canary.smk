# A proof on demand that every stage fits the next: a few rows are overfitted, exported and served.
#
# REQUIRED INPUTS   the target
# OUTPUTS           <run>/canary/result.json


rule canary:
    """Overfits a few rows of the target's own answers; a sound pipeline then accepts nearly every drafted token."""
    input:
        target_manifest(),
        conversations="<run>/conversations/val/shard-0.parquet",
    output:
        "<run>/canary/result.json",
    log:
        "<run>/logs/canary.log",
    benchmark:
        "<run>/benchmarks/canary.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
    params:
        code=code("canary"),
        target=as_json(CONFIG.target),
        draft=as_json(CONFIG.draft),
    shell:
        "bin/in-env python -m scripts.canary"
        " --target {params.target:q}"
        " --draft {params.draft:q}"
        " --conversations {input.conversations:q}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"
