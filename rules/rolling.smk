# With training.rolling: part k + 1 is extracted while segment k trains on part k, and a part is deleted once it is trained.
#
# REQUIRED INPUTS   <run>/tokens/, <run>/hidden/part-{segment}/manifest.json, <run>/checkpoints/{segment}.json
# OUTPUTS           <run>/draft/schedule.json, <run>/hidden/part-{segment}/released.json in place of the part's shards
#
# Snakemake knows the manifests of the states and not their shards (common.smk: STATES), so that nothing asks for what is
# deleted. A part waits for the record of the one that makes room for it (common.smk: made_room), so the DAG is whole from the
# first dry-run, and the parts on disk are never more than configured.


rule schedule_training:
    """The optimiser steps of every part, counted from its token rows: the learning rate knows them all from the first on."""
    input:
        tokens=expand("<run>/tokens/{part}/shard-{shard}.parquet", part=PARTS, shard=SHARDS),
    output:
        "<run>/draft/schedule.json",
    log:
        local("<run>/logs/schedule_training.log"),
    benchmark:
        "<run>/benchmarks/schedule_training.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("schedule_training"),
        training=as_json(CONFIG.training),
        tokens=lambda wildcards, input: folder(input.tokens, 2),
        shards=len(SHARDS),
    shell:
        "bin/in-env python -m scripts.schedule_training"
        " --training {params.training:q}"
        " --tokens {params.tokens:q}"
        " --shards {params.shards}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"


rule release_part:
    """The states of a part and their store are deleted once its segment's checkpoint is verified."""
    input:
        record=local("<run>/checkpoints/{segment}.json"),
        manifest=local("<run>/hidden/part-{segment}/manifest.json"),
    output:
        local("<run>/hidden/part-{segment}/released.json"),
    log:
        local("<run>/logs/release_part/{segment}.log"),
    benchmark:
        "<run>/benchmarks/release_part/{segment}.tsv"
    localrule: True
    conda:
        "../envs/cpu.yaml"
    resources:
        store=STATES_STORE,
    params:
        code=code("release_part"),
    shell:
        "bin/in-env python -m scripts.release_part"
        " --record {input.record:q}"
        " --hidden $(dirname {output:q})"
        " --store {resources.store:q}"
        " 2>&1 | tee {log:q}"
