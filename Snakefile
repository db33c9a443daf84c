"""eagle3-flow: prompts and a target in, a served EAGLE-3 draft head and the measurements that prove it out.

One file per stage in rules/, in the order of the data; paths and counts come from rules/common.smk.
Everything of a run lies in results/{run}/, and every file there can be asked for alone.
"""

from snakemake.utils import min_version

min_version("9.27")


if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/conversations.smk"
include: "rules/hidden_states.smk"
include: "rules/draft.smk"
include: "rules/evaluation.smk"
include: "rules/on_demand.smk"


if ROLLING:

    include: "rules/rolling.smk"


from scripts.eagle3.released import refuse_deleted
from scripts.eagle3.run_hooks import begin_run, end_run, note_dead_run, outlive_screen

# Stages save and end when they are asked to; the shell around them, and tee, only wait for that.
shell.prefix("set -euo pipefail; trap '' TERM INT HUP; ")

if workflow.is_main_process:
    outlive_screen()
    note_dead_run(Path.cwd())


onstart:
    try:
        refuse_deleted(workflow, Path(RUN, "hidden"))
        begin_run(workflow, CONFIG, Path.cwd(), preflight_options())
    except StageError as error:
        raise WorkflowError(str(error))


onsuccess:
    if not end_run():
        raise WorkflowError("everything is made, but the production server is not back: make restore-production")


onerror:
    end_run()
    # the cause once more, at the end of a long screen
    print(*stage_errors(), sep="\n", file=sys.stderr)


rule all:
    """The exported head, the report, and the gate, which fails when the head misses what the config asks of it."""
    default_target: True
    input:
        "<run>/export/manifest.json",
        "<run>/report.html",
        "<run>/gate.passed",
        released_parts(),
