# The draft head: its vocabulary, its architecture, its training, the best checkpoint, the folder that vLLM serves.
#
# REQUIRED INPUTS   <run>/tokens/, <run>/hidden/, <run>/target/head.safetensors
# OUTPUTS           <run>/vocab/, <run>/draft/config.json, <run>/checkpoints/, <run>/selected.json, <run>/export/


rule build_vocab_mapping:
    """The tokens that the draft can propose: the most frequent ones in what the target said, and all special ones."""
    input:
        target_manifest(),
        tokens=expand("<run>/tokens/{part}/shard-{shard}.parquet", part=[*PARTS, "val"], shard=SHARDS),
        counts=expand("<run>/tokens/{part}/counts.json", part=[*PARTS, "val"]),
    output:
        d2t="<run>/vocab/d2t.npy",
        t2d="<run>/vocab/t2d.npy",
        coverage="<run>/vocab/coverage.json",
    log:
        local("<run>/logs/build_vocab_mapping.log"),
    benchmark:
        "<run>/benchmarks/build_vocab_mapping.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("build_vocab_mapping"),
        target=as_json(CONFIG.target),
        vocabulary=as_json(CONFIG.vocabulary),
        tokens=lambda wildcards, input: folder(input.tokens, 2),
        parts=len(PARTS),
        shards=len(SHARDS),
    shell:
        "bin/in-env python -m scripts.build_vocab_mapping"
        " --target {params.target:q}"
        " --vocabulary {params.vocabulary:q}"
        " --tokens {params.tokens:q}"
        " --parts {params.parts}"
        " --shards {params.shards}"
        " --output $(dirname {output.coverage:q})"
        " 2>&1 | tee {log:q}"


rule draft_config:
    """The draft's architecture: what the config asks for, and what must agree with the target."""
    input:
        target_manifest(),
    output:
        "<run>/draft/config.json",
    log:
        local("<run>/logs/draft_config.log"),
    benchmark:
        "<run>/benchmarks/draft_config.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("draft_config"),
        target=as_json(CONFIG.target),
        draft=as_json(CONFIG.draft),
        vocabulary=as_json(CONFIG.vocabulary),
        ttt_steps=CONFIG.training.ttt_steps,
    shell:
        "bin/in-env python -m scripts.draft_config"
        " --target {params.target:q}"
        " --draft {params.draft:q}"
        " --vocabulary {params.vocabulary:q}"
        " --ttt-steps {params.ttt_steps}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"


rule train_draft:
    """One pass over the training rows, or with training.rolling all passes over one part; segment k continues from k - 1.

    One process for each GPU of the job, on each of its nodes. The weights lie beside the record.
    """
    input:
        previous_segment,
        draft="<run>/draft/config.json",
        head=ancient("<run>/target/head.safetensors"),
        vocabulary=expand("<run>/vocab/{file}", file=["d2t.npy", "t2d.npy", "coverage.json"]),
        hidden=states_of_segment,
        tokens=planned_tokens,
        schedule=planned_steps(),
    output:
        local("<run>/checkpoints/{segment}.json"),
    log:
        local("<run>/logs/train_draft/{segment}.log"),
    benchmark:
        "<run>/benchmarks/train_draft/{segment}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        nodes=1,
        checkpoint_minutes=CONFIG.training.checkpoint_minutes,
        keep_checkpoints=CONFIG.training.keep_checkpoints,
    params:
        code=code("train_draft"),
        target=as_json(CONFIG.target),
        training=as_json(CONFIG.training),
        vocabulary=lambda wildcards, input: folder(input.vocabulary),
        hidden=lambda wildcards, input: folder(input.hidden, 2),
        tokens=lambda wildcards, input: f"--tokens {folder(input.tokens)}" if ROLLING else "",
        schedule=lambda wildcards, input: f"--schedule {input.schedule}" if ROLLING else "",
        metrics=METRICS,
        parts=len(PARTS),
        shards=len(SHARDS),
    shell:
        "bin/on-nodes {resources.nodes} bin/on-gpus {resources.gpu} 0 python -m scripts.per_gpu scripts.train_draft"
        " --target {params.target:q}"
        " --training {params.training:q}"
        " --draft-config {input.draft:q}"
        " --head {input.head:q}"
        " --vocab {params.vocabulary:q}"
        " --hidden {params.hidden:q}"
        " --parts {params.parts}"
        " --shards {params.shards}"
        " {params.tokens}"
        " {params.schedule}"
        " --segment {wildcards.segment}"
        " --checkpoints $(dirname {output:q})"
        " --metrics {params.metrics:q}"
        " --checkpoint-minutes {resources.checkpoint_minutes}"
        " --keep-checkpoints {resources.keep_checkpoints}"
        " 2>&1 | tee {log:q}"


rule select_checkpoint:
    """The checkpoint with the best simulated acceptance length on validation rows; the lowest loss is not the aim."""
    input:
        checkpoints=local(expand("<run>/checkpoints/{segment}.json", segment=SEGMENTS)),
        draft="<run>/draft/config.json",
        head=ancient("<run>/target/head.safetensors"),
        vocabulary=expand("<run>/vocab/{file}", file=["d2t.npy", "t2d.npy", "coverage.json"]),
        hidden=local(expand("<run>/hidden/val/{file}", file=STATES)),
    output:
        "<run>/selected.json",
    log:
        local("<run>/logs/select_checkpoint.log"),
    benchmark:
        "<run>/benchmarks/select_checkpoint.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
    params:
        code=code("select_checkpoint"),
        target=as_json(CONFIG.target),
        speculative_tokens=CONFIG.evaluation.methods["eagle3"].num_speculative_tokens,
        vocabulary=lambda wildcards, input: folder(input.vocabulary),
        checkpoints=lambda wildcards, input: folder(input.checkpoints),
        hidden=lambda wildcards, input: folder(input.hidden),
        segments=len(SEGMENTS),
        shards=len(SHARDS),
    shell:
        "bin/on-gpus {resources.gpu} 0 python -m scripts.select_checkpoint"
        " --target {params.target:q}"
        " --checkpoints {params.checkpoints:q}"
        " --segments {params.segments}"
        " --draft-config {input.draft:q}"
        " --head {input.head:q}"
        " --vocab {params.vocabulary:q}"
        " --hidden {params.hidden:q}"
        " --shards {params.shards}"
        " --speculative-tokens {params.speculative_tokens}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"


rule export_draft:
    """The folder that `vllm serve --speculative-config` takes, checked tensor by tensor, with a model card."""
    input:
        target_manifest(),
        selected="<run>/selected.json",
        checkpoints=local(expand("<run>/checkpoints/{segment}.json", segment=SEGMENTS)),
        draft="<run>/draft/config.json",
        head=ancient("<run>/target/head.safetensors"),
        vocabulary=expand("<run>/vocab/{file}", file=["d2t.npy", "t2d.npy", "coverage.json"]),
    output:
        manifest="<run>/export/manifest.json",
        files=expand("<run>/export/{file}", file=EXPORT[1:]),
    log:
        local("<run>/logs/export_draft.log"),
    benchmark:
        "<run>/benchmarks/export_draft.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("export_draft"),
        target=as_json(CONFIG.target),
        checkpoints=lambda wildcards, input: folder(input.checkpoints),
        vocabulary=lambda wildcards, input: folder(input.vocabulary),
    shell:
        "bin/in-env python -m scripts.export_draft"
        " --target {params.target:q}"
        " --selected {input.selected:q}"
        " --checkpoints {params.checkpoints:q}"
        " --draft-config {input.draft:q}"
        " --head {input.head:q}"
        " --vocab {params.vocabulary:q}"
        " --output $(dirname {output.manifest:q})"
        " 2>&1 | tee {log:q}"
