# Prompts become training rows: collected, answered by the target itself, turned into token ids once and for all.
#
# REQUIRED INPUTS   the sources in config.conversations, the target
# OUTPUTS           <run>/conversations/, <run>/responses/, <run>/tokens/ with {part}/shard-{shard}.parquet
#                   part-0, part-1, ... are training rows, val is validation; conversations/eval/ only evaluates


rule collect_conversations:
    """Normalises, de-duplicates and decontaminates the sources; deals rows to parts, holds validation rows out."""
    input:
        sources=local_sources(),
    output:
        expand("<run>/conversations/{part}/shard-{shard}.parquet", part=[*PARTS, "val"], shard=SHARDS),
        expand("<run>/conversations/eval/{suite}.parquet", suite=SUITES),
        ledger="<run>/conversations/ledger.json",
    log:
        local("<run>/logs/collect_conversations.log"),
    benchmark:
        "<run>/benchmarks/collect_conversations.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("collect_conversations"),
        conversations=as_json(CONFIG.conversations),
        scatter=as_json(CONFIG.scatter),
    shell:
        "bin/in-env python -m scripts.collect_conversations"
        " --conversations {params.conversations:q}"
        " --scatter {params.scatter:q}"
        " --output $(dirname {output.ledger:q})"
        " 2>&1 | tee {log:q}"


rule regenerate_responses:
    """The target answers the prompts of one part itself: one engine load, answers kept as token ids."""
    input:
        target_manifest(),
        passed_canary(),
        conversations=expand("<run>/conversations/{{part}}/shard-{shard}.parquet", shard=SHARDS),
    output:
        expand("<run>/responses/{{part}}/shard-{shard}.parquet", shard=SHARDS),
    log:
        local("<run>/logs/regenerate_responses/{part}.log"),
    benchmark:
        "<run>/benchmarks/regenerate_responses/{part}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        min_gpus=CONFIG.target.min_gpus,
        gpu_memory_percent=90,
        batch_tokens=8192,
        max_num_seqs=128,
        store=STORE,
    params:
        code=code("regenerate_responses"),
        target=as_json(CONFIG.target),
        responses=as_json(CONFIG.responses),
        rows=as_json(CONFIG.rows),
        max_rejected_fraction=CONFIG.conversations.max_rejected_fraction,
        conversations=lambda wildcards, input: folder(input.conversations),
        output=lambda wildcards, output: folder(output),
        shards=len(SHARDS),
    shell:
        "bin/on-gpus {resources.gpu} {resources.min_gpus} python -m scripts.regenerate_responses"
        " --target {params.target:q}"
        " --responses {params.responses:q}"
        " --rows {params.rows:q}"
        " --max-rejected-fraction {params.max_rejected_fraction}"
        " --conversations {params.conversations:q}"
        " --shards {params.shards}"
        " --store {resources.store:q}"
        " --output {params.output:q}"
        " --gpu-memory-percent {resources.gpu_memory_percent}"
        " --batch-tokens {resources.batch_tokens}"
        " --max-num-seqs {resources.max_num_seqs}"
        " 2>&1 | tee {log:q}"


rule tokenize_conversations:
    """Training rows: token ids with a loss mask on what the target said, and counts for the vocabulary."""
    input:
        target_manifest(),
        answered=answered_rows,
    output:
        expand("<run>/tokens/{{part}}/shard-{shard}.parquet", shard=SHARDS),
        counts="<run>/tokens/{part}/counts.json",
    log:
        local("<run>/logs/tokenize_conversations/{part}.log"),
    benchmark:
        "<run>/benchmarks/tokenize_conversations/{part}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("tokenize_conversations"),
        target=as_json(CONFIG.target),
        responses=as_json(CONFIG.responses),
        rows=as_json(CONFIG.rows),
        max_rejected_fraction=CONFIG.conversations.max_rejected_fraction,
        answered=lambda wildcards, input: folder(input.answered),
        shards=len(SHARDS),
    shell:
        "bin/in-env python -m scripts.tokenize_conversations"
        " --target {params.target:q}"
        " --responses {params.responses:q}"
        " --rows {params.rows:q}"
        " --max-rejected-fraction {params.max_rejected_fraction}"
        " --input {params.answered:q}"
        " --shards {params.shards}"
        " --output $(dirname {output.counts:q})"
        " 2>&1 | tee {log:q}"
