# Paths, counts and sections of the configuration that the rules share.
#
# `<run>` in a path is results/{run}/. A section of the configuration reaches its stage as JSON in `params`, so that a
# change reruns exactly what depends on it; what only changes speed or place stands in `resources`, which profiles set.

import sys
import time
from pathlib import Path
from shlex import join

sys.path.insert(0, workflow.basedir)

from scripts.eagle3.config import load_config
from scripts.eagle3.errors import StageError
from scripts.eagle3.source_files import code_digest

try:
    CONFIG = load_config(config)
except StageError as error:
    raise WorkflowError(str(error))

STARTED = time.time()
RUN = f"results/{CONFIG.run}"
PARTS = [f"part-{part}" for part in range(CONFIG.scatter.parts)]
SHARDS = range(CONFIG.scatter.shards_per_part)
SUITES = list(CONFIG.conversations.evaluation)
METHODS = list(CONFIG.evaluation.methods)
SEGMENTS = range(CONFIG.training.segments)
ROLLING = CONFIG.training.rolling
# What stands for the states of a part: its shards, or where these are deleted after training the manifest, which stays.
SHARD_FILES = [] if ROLLING else [f"shard-{shard}.pt" for shard in SHARDS]
STATES = SHARD_FILES or ["manifest.json"]
PLOTS = ["training", "acceptance", "coverage", "segments"]
EXPORT = ["manifest.json", "config.json", "model.safetensors", "provenance.json", "README.md"]

# Finished work of long jobs, and what else stays on the shared disk when results lie in object storage.
STORE = f"{RUN}/store"
METRICS = f"{RUN}/metrics"
STATES_STORE = f"{CONFIG.storage.hidden_states}/{CONFIG.run}" if CONFIG.storage.hidden_states else STORE

# Capped to the cores of the machine: on a laptop the heavy jobs then run one after the other.
ALL_CORES = 64


pathvars:
    run=RUN,


wildcard_constraints:
    part=r"part-\d+|val",
    shard=r"\d+",
    segment=r"\d+",


def as_json(section):
    """A section of the configuration as a command-line argument."""
    return section if isinstance(section, str) else section.model_dump_json()


def code(script):
    """Stands for the code of a stage: what it does, not its age, comments or docstrings, decides a rerun."""
    if ROLLING and script in ("extract_hidden_states", "release_part"):
        return "any"  # an edit would ask for states that are deleted; where they are not, the store has them
    return code_digest(script, Path(workflow.basedir))


def folder(files, up=1):
    """The folder of a file, or of the first of a list, `up` levels above it: stages take folders and counts."""
    return str(Path(files if isinstance(files, str) else files[0]).parents[up - 1])


def target_manifest():
    """The manifest of a target that this workflow makes; nothing for a target that lies elsewhere."""
    path = CONFIG.target.path
    if not path.startswith("results/targets/"):
        return []
    if path != "results/targets/smollm2-135m":
        raise WorkflowError(
            f"target.path is {path}: results/targets/ is for what this workflow makes; put yours elsewhere"
        )
    return [local(f"{path}/manifest.json")]


def passed_canary():
    """What stands before the first answer: with canary_first, a pipeline that has shown itself on ten rows."""
    return ancient("<run>/canary/result.json") if CONFIG.canary_first else []


def answered_rows(wildcards):
    """What tokenize_conversations reads: the target's own answers, or the data set's."""
    stage = "conversations" if CONFIG.responses == "given" else "responses"
    return [f"{RUN}/{stage}/{wildcards.part}/shard-{shard}.parquet" for shard in SHARDS]


def answered_prompts():
    """All shards of the target's own answers; nothing where the data set's are kept."""
    return (
        []
        if CONFIG.responses == "given"
        else expand("<run>/responses/{part}/shard-{shard}.parquet", part=[*PARTS, "val"], shard=SHARDS)
    )


def previous_segment(wildcards):
    """The record that segment k continues from."""
    return [local(f"{RUN}/checkpoints/{int(wildcards.segment) - 1}.json")] if int(wildcards.segment) else []


def states_of_segment(wildcards):
    """What a segment trains on: the states of all parts, in rolling mode of its own."""
    parts = [f"part-{wildcards.segment}"] if ROLLING else PARTS
    return local([f"{RUN}/hidden/{part}/{file}" for part in [*parts, "val"] for file in STATES])


def planned_tokens(wildcards):
    """What the steps of a segment are planned from in rolling mode, where it may miss rejected rows."""
    return [f"{RUN}/tokens/part-{wildcards.segment}/shard-{shard}.parquet" for shard in SHARDS if ROLLING]


def planned_steps():
    """The number of steps of every segment in rolling mode, which sees one part at a time."""
    return "<run>/draft/schedule.json" if ROLLING else []


def made_room(wildcards):
    """In rolling mode a part waits until enough of those before it are deleted."""
    if not ROLLING or wildcards.part == "val":
        return []
    before = int(wildcards.part.removeprefix("part-")) - ROLLING.parts_on_disk
    return [local(f"{RUN}/hidden/part-{before}/released.json")] if before >= 0 else []


def released_parts():
    """In rolling mode the end of a run deletes the last parts too."""
    return local(expand("<run>/hidden/{part}/released.json", part=PARTS if ROLLING else []))


def local_sources():
    """The files among the sources; ids of data sets are downloaded by the job, missing files are refused by it."""
    sources = [*CONFIG.conversations.train, *CONFIG.conversations.evaluation.values()]
    return [local(source.path) for source in sources if Path(source.path).is_file()]


def exported_head(wildcards):
    """The run's own export, for a method that decodes with it."""
    method = CONFIG.evaluation.methods[wildcards.method]
    own = method.kind == "eagle3" and method.model is None
    return [f"{RUN}/export/{file}" for file in EXPORT] if own else []


def baseline_results(wildcards):
    """What the other methods' outputs are compared with."""
    if CONFIG.evaluation.methods[wildcards.method].kind == "baseline":
        return []
    return [f"{RUN}/evaluation/baseline/{suite}.json" for suite in SUITES]


def preflight_options():
    """What is checked before a run: on demand, and at the start of each run that loads the target."""
    options = ["--config", as_json(CONFIG), "--run", RUN, "--storage", STATES_STORE]
    options += ["--min-gpus", str(CONFIG.target.min_gpus)]
    if CONFIG.production:
        options += ["--production", as_json(CONFIG.production)]
    if not workflow.local_exec:
        options += ["--elsewhere"]
    return options


def stage_errors():
    """The error lines of the jobs that ran now: a failed stage says in one line what was wrong."""
    logs = sorted(log for log in Path(RUN, "logs").rglob("*.log") if log.stat().st_mtime >= STARTED)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if ": error: " in line]
    return [f"\n{line}" for line in lines]
