"""`wavepp plan`: the pipeline a configuration would make, with reasons; profiles of machines."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from wavepp.bench.plan_report import StagePlan, reasons
from wavepp.config import EngineConfig
from wavepp.console import open_console, print_under
from wavepp.engine import check_folder

CONTEXT_FOR_WORK = 4096  # tokens of context at which the work of stages is compared


def run(config: EngineConfig, profile: Path | None) -> None:
    """Prints the plan; with `profile` measures this machine first and writes a cost model there.

    Raises:
        ConfigError: the model can't be read or split so, or the file can't be written.
    """
    check_folder(config)
    if profile is not None:
        from wavepp.bench.profile import write_profile

        config = write_profile(config, profile)
    emulated = config.device == "emulated"
    stages, max_model_len = _emulated(config) if emulated else _checkpoint(config)
    console = open_console()
    device = config.device if config.cost_model is None else f"emulated, {config.cost_model}"
    heading = f"{config.model_name}, {len(stages)} stages, device {device}"
    print_under(console, heading, _table(stages))
    for sentence in reasons(config, stages, max_model_len):
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)


def _emulated(config: EngineConfig) -> tuple[list[StagePlan], int]:
    from wavepp.emulated.stage_model import build_stage_model

    models = [build_stage_model(config, n) for n in range(config.pipeline_parallel_size)]
    stages = []
    for model in models:
        facts = model.facts
        paged = [group for group in facts.groups if group.kind != "recurrent"]
        units = min((group.units for group in paged), default=0)
        stages.append(
            StagePlan(
                layers=facts.layers,
                work=model.costs.c1 + model.costs.c2 * CONTEXT_FOR_WORK,
                weight_bytes=facts.weight_bytes,
                cache_bytes=sum(group.units * group.bytes_per_unit for group in facts.groups),
                pool_tokens=units * facts.block_size,
                costs=model.costs,
            )
        )
    return stages, models[0].facts.max_model_len


def _checkpoint(config: EngineConfig) -> tuple[list[StagePlan], int]:
    from wavepp.models.cache_pools import group_units
    from wavepp.models.config import read_model_spec
    from wavepp.models.partition import stage_layers
    from wavepp.models.spec import DTYPE_BYTES

    spec = read_model_spec(config.model, config.dtype)
    max_model_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    stages = []
    split = stage_layers(spec, config.pipeline_parallel_size, config.layer_partition)
    for lo, hi in split:
        pools = group_units(config, spec, (lo, hi), max_model_len)
        recurrent = {g.name for g in spec.groups_in(lo, hi) if g.kind == "recurrent"}
        units = [pool.units for name, pool in pools.items() if name not in recurrent]
        work = sum(layer.cost() for layer in spec.layers[lo:hi])
        work += spec.embedding_cost if lo == 0 else 0
        work += spec.head_cost if hi == spec.num_layers else 0
        stages.append(
            StagePlan(
                layers=(lo, hi),
                work=work,
                weight_bytes=spec.parameters_in(lo, hi) * DTYPE_BYTES[spec.dtype],
                cache_bytes=sum(pool.units * pool.bytes_per_unit for pool in pools.values()),
                pool_tokens=min(units, default=0) * config.block_size,
            )
        )
    return stages, max_model_len


def _table(stages: list[StagePlan]) -> Table:
    made = Table(box=box.SIMPLE)
    for name in ("stage", "layers", "work", "weights GB", "cache GB", "cache tokens"):
        made.add_column(name, justify="right")
    whole = sum(stage.work for stage in stages)
    for number, stage in enumerate(stages):
        made.add_row(
            str(number),
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            f"{stage.work / whole:.1%}",
            f"{stage.weight_bytes / 1e9:.2f}",
            f"{stage.cache_bytes / 1e9:.2f}",
            f"{stage.pool_tokens:,}",
        )
    return made
