# The target reads every training row once, and its hidden states are kept.
#
# REQUIRED INPUTS   <run>/tokens/{part}/, the target
# OUTPUTS           <run>/hidden/{part}/shard-{shard}.pt and manifest.json; with training.rolling Snakemake knows the
#                   manifests alone, since the shards of a part are deleted when it is trained (rolling.smk)


rule extract_hidden_states:
    """Auxiliary and final states of all rows of one part: one engine load, proven aligned before any bulk work."""
    input:
        target_manifest(),
        made_room,
        tokens=expand("<run>/tokens/{{part}}/shard-{shard}.parquet", shard=SHARDS),
    output:
        local(expand("<run>/hidden/{{part}}/{file}", file=SHARD_FILES)),
        manifest=local("<run>/hidden/{part}/manifest.json"),
    log:
        local("<run>/logs/extract_hidden_states/{part}.log"),
    benchmark:
        "<run>/benchmarks/extract_hidden_states/{part}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        min_gpus=CONFIG.target.min_gpus,
        gpu_memory_percent=90,
        batch_tokens=4096,
        max_num_seqs=128,
        store=STATES_STORE,
    params:
        code=code("extract_hidden_states"),
        target=as_json(CONFIG.target),
        tokens=lambda wildcards, input: folder(input.tokens),
        shards=len(SHARDS),
        dtype=CONFIG.extraction.dtype,
        final_states=CONFIG.extraction.final_states,
    shell:
        "bin/on-gpus {resources.gpu} {resources.min_gpus} python -m scripts.extract_hidden_states"
        " --target {params.target:q}"
        " --tokens {params.tokens:q}"
        " --shards {params.shards}"
        " --store {resources.store:q}"
        " --output $(dirname {output.manifest:q})"
        " --dtype {params.dtype}"
        " --final-states {params.final_states}"
        " --gpu-memory-percent {resources.gpu_memory_percent}"
        " --batch-tokens {resources.batch_tokens}"
        " --max-num-seqs {resources.max_num_seqs}"
        " 2>&1 | tee {log:q}"
