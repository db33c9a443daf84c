# On demand, never part of a run: cost, whether all is in place, whether every stage fits the next, room on the disk.
#
# REQUIRED INPUTS   nothing for plan; the target for preflight and canary
# OUTPUTS           <run>/plan.json and plan.md; a table on the screen; <run>/canary/result.json; room on the disk


rule plan:
    """What the run will write, take and cost, before it starts; fails when the disk cannot hold it."""
    input:
        hardware=local("config/hardware.yaml"),
    log:
        local("<run>/logs/plan.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/cpu.yaml"
    resources:
        gpu_model="cpu",
        node_gpus=0,
        nodes=1,
        max_num_seqs=128,
        training_gpus=0,
    params:
        config=as_json(CONFIG),
        run=RUN,
        storage=STATES_STORE,
        parts_on_disk=f"--parts-on-disk {ROLLING.parts_on_disk}" if ROLLING else "",
    shell:
        "bin/in-env python -m scripts.plan"
        " --config {params.config:q}"
        " --run {params.run:q}"
        " --storage {params.storage:q}"
        " --hardware {input.hardware:q}"
        " --gpu-model={resources.gpu_model:q}"
        " --gpus {resources.node_gpus}"
        " --nodes {resources.nodes}"
        " --max-num-seqs {resources.max_num_seqs}"
        " --training-gpus {resources.training_gpus}"
        " {params.parts_on_disk}"
        " 2>&1 | tee {log:q}"


rule preflight:
    """Everything that can be checked before the target is loaded, as one table; each red line says what to do."""
    log:
        local("<run>/logs/preflight.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/cpu.yaml"
    resources:
        node_gpus=0,
        gpu_memory_percent=90,
    params:
        options=lambda wildcards: join(preflight_options()),
    shell:
        "bin/in-env python -m scripts.preflight"
        " {params.options}"
        " --gpus {resources.node_gpus}"
        " --gpu-memory-percent {resources.gpu_memory_percent}"
        " 2>&1 | tee {log:q}"


rule canary:
    """Overfits a few rows of the target's own answers; a sound pipeline then accepts nearly every drafted token."""
    input:
        target_manifest(),
        conversations="<run>/conversations/val/shard-0.parquet",
    output:
        "<run>/canary/result.json",
    log:
        local("<run>/logs/canary.log"),
    benchmark:
        "<run>/benchmarks/canary.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        min_gpus=CONFIG.target.min_gpus,
    params:
        code=code("canary"),
        target=as_json(CONFIG.target),
        draft=as_json(CONFIG.draft),
    shell:
        "bin/on-gpus {resources.gpu} {resources.min_gpus} python -m scripts.canary"
        " --target {params.target:q}"
        " --draft {params.draft:q}"
        " --conversations {input.conversations:q}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"


rule clean_rows:
    """Deletes stored states that nothing will read: of another target, layers, dtype or layout, or of an earlier deal."""
    input:
        target_manifest(),
    log:
        local("<run>/logs/clean_rows.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/cpu.yaml"
    resources:
        store=STATES_STORE,
    params:
        target=as_json(CONFIG.target),
        run=RUN,
        parts=len(PARTS),
        shards=len(SHARDS),
        dtype=CONFIG.extraction.dtype,
        final_states=CONFIG.extraction.final_states,
    shell:
        "bin/in-env python -m scripts.clean_rows"
        " --target {params.target:q}"
        " --run {params.run:q}"
        " --store {resources.store:q}"
        " --parts {params.parts}"
        " --shards {params.shards}"
        " --dtype {params.dtype}"
        " --final-states {params.final_states}"
        " 2>&1 | tee {log:q}"
