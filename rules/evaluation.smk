# What the head is worth: served against the baseline, simulated against served, one report, one gate.
#
# REQUIRED INPUTS   <run>/conversations/eval/, <run>/export/, the target
# OUTPUTS           <run>/evaluation/, <run>/report.html


rule evaluate_method:
    """Every suite decoded by one method with the real engine: outputs, acceptance, tokens per second."""
    input:
        target_manifest(),
        export=exported_head,
        baseline=baseline_results,
        suites=expand("<run>/conversations/eval/{suite}.parquet", suite=SUITES),
    output:
        expand("<run>/evaluation/{{method}}/{suite}.json", suite=SUITES),
    log:
        local("<run>/logs/evaluate_method/{method}.log"),
    benchmark:
        "<run>/benchmarks/evaluate_method/{method}.tsv"
    wildcard_constraints:
        method="|".join(METHODS),
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        min_gpus=CONFIG.target.min_gpus,
        gpu_memory_percent=90,
        batch_tokens=4096,
        store=STORE,
    params:
        code=code("evaluate_method"),
        target=as_json(CONFIG.target),
        evaluation=as_json(CONFIG.evaluation),
        export=lambda wildcards, input: f"--export {folder(input.export)}" if input.export else "",
        baseline=lambda wildcards, input: f"--baseline {folder(input.baseline)}" if input.baseline else "",
        conversations=lambda wildcards, input: folder(input.suites),
        output=lambda wildcards, output: folder(output),
        suites=SUITES,
    shell:
        "bin/on-gpus {resources.gpu} {resources.min_gpus} python -m scripts.evaluate_method"
        " --target {params.target:q}"
        " --evaluation {params.evaluation:q}"
        " --method {wildcards.method}"
        " {params.export}"
        " {params.baseline}"
        " --conversations {params.conversations:q}"
        " --suites {params.suites}"
        " --store {resources.store:q}"
        " --output {params.output:q}"
        " --gpu-memory-percent {resources.gpu_memory_percent}"
        " --batch-tokens {resources.batch_tokens}"
        " 2>&1 | tee {log:q}"


rule simulate_acceptance:
    """The exported draft teacher-forced over the baseline's answers and walked as the server walks."""
    input:
        target_manifest(),
        export=expand("<run>/export/{file}", file=EXPORT),
        baseline=expand("<run>/evaluation/baseline/{suite}.json", suite=SUITES),
    output:
        expand("<run>/evaluation/simulated/{suite}.json", suite=SUITES),
    log:
        local("<run>/logs/simulate_acceptance.log"),
    benchmark:
        "<run>/benchmarks/simulate_acceptance.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: ALL_CORES
    resources:
        gpu=0,
        min_gpus=CONFIG.target.min_gpus,
        gpu_memory_percent=90,
        batch_tokens=4096,
        max_num_seqs=128,
    params:
        code=code("simulate_acceptance"),
        target=as_json(CONFIG.target),
        evaluation=as_json(CONFIG.evaluation),
        export=lambda wildcards, input: folder(input.export),
        baseline=lambda wildcards, input: folder(input.baseline),
        output=lambda wildcards, output: folder(output),
        suites=SUITES,
    shell:
        "bin/on-gpus {resources.gpu} {resources.min_gpus} python -m scripts.simulate_acceptance"
        " --target {params.target:q}"
        " --evaluation {params.evaluation:q}"
        " --export {params.export:q}"
        " --baseline {params.baseline:q}"
        " --suites {params.suites}"
        " --output {params.output:q}"
        " --gpu-memory-percent {resources.gpu_memory_percent}"
        " --batch-tokens {resources.batch_tokens}"
        " --max-num-seqs {resources.max_num_seqs}"
        " 2>&1 | tee {log:q}"


rule compare_methods:
    """One summary of all methods and suites, and the plots."""
    input:
        methods=expand("<run>/evaluation/{method}/{suite}.json", method=METHODS, suite=SUITES),
        simulated=expand("<run>/evaluation/simulated/{suite}.json", suite=SUITES),
        checkpoints=local(expand("<run>/checkpoints/{segment}.json", segment=SEGMENTS)),
        coverage="<run>/vocab/coverage.json",
        selected="<run>/selected.json",
    output:
        expand("<run>/evaluation/summary.{format}", format=["json", "csv", "md"]),
        expand("<run>/evaluation/plots/{plot}.svg", plot=PLOTS),
    log:
        local("<run>/logs/compare_methods.log"),
    benchmark:
        "<run>/benchmarks/compare_methods.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("compare_methods"),
        evaluation=as_json(CONFIG.evaluation),
        run=lambda wildcards, input: folder(input.coverage, 2),
        checkpoints=lambda wildcards, input: folder(input.checkpoints),
        metrics=METRICS,
        suites=SUITES,
        segments=len(SEGMENTS),
    shell:
        "bin/in-env python -m scripts.compare_methods"
        " --evaluation {params.evaluation:q}"
        " --run {params.run:q}"
        " --checkpoints {params.checkpoints:q}"
        " --metrics {params.metrics:q}"
        " --suites {params.suites}"
        " --segments {params.segments}"
        " 2>&1 | tee {log:q}"


rule report:
    """The run as one self-contained page: what was made, from what, how well it works, what it does not show."""
    input:
        local("scripts/eagle3/report_template.html.j2"),
        answered_prompts(),
        "<run>/conversations/ledger.json",
        "<run>/vocab/coverage.json",
        "<run>/selected.json",
        expand("<run>/tokens/{part}/counts.json", part=[*PARTS, "val"]),
        expand("<run>/evaluation/eagle3/{suite}.json", suite=SUITES),
        hidden=local(expand("<run>/hidden/{part}/{file}", part=[*PARTS, "val"], file=STATES)),
        summary="<run>/evaluation/summary.json",
        plots=expand("<run>/evaluation/plots/{plot}.svg", plot=PLOTS),
    output:
        "<run>/report.html",
    log:
        local("<run>/logs/report.log"),
    benchmark:
        "<run>/benchmarks/report.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("report"),
        config=as_json(CONFIG),
        run=lambda wildcards, input: folder(input.summary, 2),
        hidden=lambda wildcards, input: folder(input.hidden, 2),
    shell:
        "bin/in-env python -m scripts.report"
        " --config {params.config:q}"
        " --run {params.run:q}"
        " --hidden {params.hidden:q}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"


rule check_gate:
    """Fails when the summary misses what the config asks for. It runs last, so that a miss destroys nothing."""
    input:
        summary="<run>/evaluation/summary.json",
        report="<run>/report.html",
    output:
        touch("<run>/gate.passed"),
    log:
        local("<run>/logs/check_gate.log"),
    benchmark:
        "<run>/benchmarks/check_gate.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("check_gate"),
        gate=as_json(CONFIG.gate),
    shell:
        "bin/in-env python -m scripts.check_gate"
        " --summary {input.summary:q}"
        " --gate {params.gate:q}"
        " 2>&1 | tee {log:q}"
