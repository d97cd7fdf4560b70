"""The installed Lightning, torch and torchmetrics have the private attributes that ltui relies on.

Each function of ``lightning_internals.py`` and ``torch_internals.py`` is called on a real object,
and its result must have the expected shape. A new version that renames an attribute fails here, and
the message names the attribute.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from ltui.training.rank import lightning_internals, torch_internals
from ltui.training.rank.coordination.save_checkpoint import saves_with_all_ranks
from ltui.training.rank.flight_recorder import UNKNOWN, FlightRecorder, dump_functions
from tests.rank.runs import QUIET


class _Model(pl.LightningModule):
    """A module that runs ``probe`` in its second training step and logs two values."""

    def __init__(self, probe: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mean = torchmetrics.MeanMetric()
        self.probe = probe

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=2)
        self.log("metric", self.mean, on_epoch=True)
        if index == 1:
            self.probe(self)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, **options)


def _trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{**QUIET, "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, **options}
    )


def in_step(check: Callable[[Any, Any], None]) -> None:
    """Call ``check`` with the Trainer and the module in the second step of a training."""
    trainer, done = _trainer(), list[bool]()

    def probe(module: Any) -> None:
        check(trainer, module)
        done.append(True)

    trainer.fit(_Model(probe), _loader(), _loader())
    assert done


def test_connectors_have_the_methods_that_are_called() -> None:
    trainer = _trainer()
    logger = lightning_internals.logger_connector(trainer)
    names = ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics")
    for name in names:
        assert callable(getattr(logger, name)), name
    checkpoint = lightning_internals.checkpoint_connector(trainer)
    for name in ("dump_checkpoint", "resume_start", "restore_optimizers_and_schedulers"):
        assert callable(getattr(checkpoint, name)), name
    inspect.signature(checkpoint.dump_checkpoint).bind(False)
    inspect.signature(checkpoint.resume_start).bind("path")
    if not version("lightning").startswith("2.5."):
        inspect.signature(checkpoint.resume_start).bind("path", weights_only=False)
    assert lightning_internals.loaded_checkpoint(checkpoint) == {}
    assert callable(lightning_internals.signal_connector(trainer).register_signal_handlers)


def test_the_attributes_for_an_exact_resume_are_complete(monkeypatch: Any) -> None:
    random_state = torch.get_rng_state()
    torch_internals.require_exact_resume()
    lightning_internals.require_exact_resume(_trainer())
    assert torch.equal(torch.get_rng_state(), random_state)
    trainer = _trainer()
    del trainer.fit_loop._combined_loader
    with pytest.raises(AttributeError, match="_combined_loader"):
        lightning_internals.require_exact_resume(trainer)
    monkeypatch.delattr(DataLoader, "_get_iterator")
    with pytest.raises(AttributeError, match="_get_iterator"):
        torch_internals.require_exact_resume()


def test_logged_values_are_readable_within_a_step() -> None:
    def check(trainer: Any, module: Any) -> None:
        results = lightning_internals.training_results(trainer)
        assert lightning_internals.active_results(trainer) is results
        assert {"training_step.loss", "training_step.metric"} <= set(results)
        loss, metric = results["training_step.loss"], results["training_step.metric"]
        assert (loss.is_tensor, metric.is_tensor) == (True, False)
        # Lightning ignores sync_dist=True on one device.
        assert lightning_internals.is_synchronised(loss.meta) is False
        assert loss.meta.sync.rank_zero_only is False
        for name in lightning_internals.RESULT_META_FIELDS:
            assert hasattr(loss.meta, name), name
        for name in ("value", "cumulated_batch_size", "has_reset"):
            assert hasattr(loss, name), name
        assert hasattr(results, "batch_size")
        connector = lightning_internals.logger_connector(trainer)
        assert lightning_internals.is_within_batch(connector) is True
        assert lightning_internals.is_accumulating(trainer) is False
        row = results.metrics(True)["log"]
        assert row
        assert all(isinstance(value, torch.Tensor) for value in row.values())
        names = lightning_internals.METRIC_TABLES
        tables = [lightning_internals.metric_table(trainer, name) for name in names]
        assert all(isinstance(table, dict) for table in tables)
        # The first batch of the epoch has ended, so its values are stored.
        assert lightning_internals.callback_table(connector) is tables[0]
        assert isinstance(tables[0]["loss"], torch.Tensor)
        assert torch_internals.update_count(module.mean) == 2

    in_step(check)


def test_a_result_can_be_built_and_updated() -> None:
    def check(trainer: Any, _module: Any) -> None:
        results = lightning_internals.training_results(trainer)
        meta = results["training_step.loss"].meta
        built = lightning_internals.make_result_metric(
            results,
            {name: getattr(meta, name) for name in lightning_internals.RESULT_META_FIELDS},
            reduce_fx=meta.reduce_fx.__name__,
            reduce=lambda value, *_: value,
            sync_dist=True,
            rank_zero_only=False,
            is_tensor=True,
        )
        assert type(built) is type(results["training_step.loss"])
        assert built.meta.name == "loss"
        assert lightning_internals.is_synchronised(built.meta) is True
        before = built._update_count
        lightning_internals.mark_as_updated(built)
        assert (before, built._update_count, built.update_called) == (0, 1, True)

    in_step(check)


def test_what_a_model_checkpoint_saved_last_is_read_and_set(tmp_path: Path) -> None:
    saving, other = (ModelCheckpoint(tmp_path, every_n_train_steps=2) for _ in range(2))
    trainer = _trainer(enable_checkpointing=True, callbacks=[saving])
    trainer.fit(_Model(lambda _: None), _loader())
    fields = lightning_internals.last_saves(saving)
    (file,) = tmp_path.iterdir()
    if not version("lightning").startswith("2.5."):
        assert set(fields) == set(lightning_internals.SAVE_FIELDS)
        assert fields["_defer_save_until_validation"] is False
    assert fields["_last_global_step_saved"] == trainer.global_step == 4
    assert fields["_last_checkpoint_saved"] == str(file)
    lightning_internals.set_last_saves(other, {**fields, "dirpath": "elsewhere"})
    assert lightning_internals.last_saves(other) == fields
    assert other.dirpath == saving.dirpath


def test_loops_and_loaders_within_a_step() -> None:
    def check(trainer: Any, _module: Any) -> None:
        loop = trainer.fit_loop
        assert len(lightning_internals.combined_loader(loop).flattened) == 1
        fetcher = lightning_internals.data_fetcher(loop)
        for name in ("batches", "fetched", "done", "iterator"):
            assert hasattr(fetcher, name), name
        iterator = lightning_internals.loader_iterator(fetcher, 0)
        assert torch_internals.yielded_batches(iterator) == 2
        assert hasattr(loop, "_loaded_from_state_dict")
        assert lightning_internals.is_state_loaded(loop) is False
        assert lightning_internals.is_resuming(loop) is False
        assert lightning_internals.is_training_done(loop.epoch_loop) is False
        assert lightning_internals.should_check_validation(loop) is False

    in_step(check)


def test_methods_of_loops_can_be_replaced() -> None:
    trainer = _trainer()
    loop = trainer.fit_loop
    lightning_internals.check_validation_signature(loop)
    of_2_0: Any = types.SimpleNamespace(_should_check_val_fx=lambda: True)
    with pytest.raises(TypeError, match="too many positional arguments"):
        lightning_internals.check_validation_signature(types.SimpleNamespace(epoch_loop=of_2_0))
    calls: list[str] = []
    load_states = lightning_internals.replace_load_loader_states(
        loop, lambda: calls.append("states")
    )
    assert inspect.ismethod(load_states)

    def wrap_fetch(before: Any, after: Any) -> Any:
        assert inspect.ismethod(before)
        assert inspect.ismethod(after)
        return lambda: calls.append("before"), lambda: calls.append("after")

    lightning_internals.wrap_fetch_hooks(loop.epoch_loop, wrap_fetch)

    def wrap_closure(after_closure: Any) -> Any:
        assert inspect.ismethod(after_closure)

        def closure_done(*args: Any) -> None:
            calls.append("closure")
            after_closure(*args)

        return closure_done

    lightning_internals.wrap_after_closure(trainer.strategy.precision_plugin, wrap_closure)
    trainer.fit(_Model(lambda _: None), _loader())
    # Lightning calls each replacement: the states once, the others in this order for each batch.
    assert calls == ["states", *["before", "after", "closure"] * 4]


def test_the_manual_step_hook_is_called() -> None:
    class Manual(_Model):
        def __init__(self) -> None:
            super().__init__(lambda _: None)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            self.manual_backward(self.layer(batch[0]).mean())
            optimizer.step()

    trainer = _trainer()
    manual = trainer.fit_loop.epoch_loop.manual_optimization
    calls: list[int] = []

    def wrap(after_step: Any) -> Any:
        assert inspect.ismethod(after_step)

        def counted() -> None:
            calls.append(1)
            after_step()

        return counted

    lightning_internals.wrap_after_manual_step(manual, wrap)
    trainer.fit(Manual(), _loader())
    assert len(calls) == 4


def test_resuming_can_be_cleared() -> None:
    loop = _trainer().fit_loop
    loop._restarting = True
    loop.epoch_loop.restarting = True
    lightning_internals.clear_resuming(loop)
    assert loop.restarting is False
    assert loop.epoch_loop.restarting is False
    assert lightning_internals.is_resuming(loop) is False


def test_the_default_profiler_can_be_silenced() -> None:
    trainer: Any = _trainer()
    assert lightning_internals.silence_idle_profiler(trainer) is True
    with trainer.profiler.profile("action"):
        pass
    assert lightning_internals.silence_idle_profiler(_trainer(profiler="simple")) is False


def test_the_ddp_strategy_has_a_setup_method() -> None:
    strategy = DDPStrategy()
    assert inspect.ismethod(strategy._setup_model)
    inspect.signature(strategy._setup_model).bind(None)
    called: list[Any] = []
    lightning_internals.call_after_model_setup(object(), called.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "_setup_model", lambda _strategy, model: model)
        lightning_internals.call_after_model_setup(strategy, called.append)
        assert [strategy._setup_model(n) for n in (1, 2)] == [1, 2]
    assert called == [1], "only the next model"
    assert "_setup_model" not in vars(strategy)


def test_strategies_that_save_in_collectives_are_recognised() -> None:
    assert saves_with_all_ranks(ModelParallelStrategy())
    for strategy in (DDPStrategy(), SingleDeviceStrategy("cpu")):
        assert not saves_with_all_ranks(strategy)


def test_the_sampler_inside_lightnings_wrapper_is_found() -> None:
    sampler = SequentialSampler(range(8))
    wrapper = DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
    assert lightning_internals.wrapped_sampler(wrapper) is sampler
    assert lightning_internals.wrapped_sampler(sampler) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaders_iterator_can_be_replaced_and_discarded(workers: int) -> None:
    loader = _loader(num_workers=workers, persistent_workers=workers > 0)
    created = []

    def create() -> Any:
        created.append(torch_internals.create_iterator(loader))
        return created[-1]

    torch_internals.replace_get_iterator(loader, create)
    iterator: Any = iter(loader)
    assert created == [iterator]
    next(iterator)
    assert torch_internals.yielded_batches(iterator) == 1
    assert torch_internals.loader_batch_size(iterator) == 2
    kept = torch_internals.persistent_iterator(loader)
    assert kept is (iterator if workers else None)
    if workers:
        processes = list(iterator._workers)
        torch_internals.discard_iterator(loader)
        assert torch_internals.persistent_iterator(loader) is None
        assert not any(process.is_alive() for process in processes)
    torch_internals.restore_get_iterator(loader)
    assert "_get_iterator" not in vars(loader)
    assert torch_internals.persistent_iterator(object()) is None


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_reducer_can_be_read_and_rebuilt(process_group: None) -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    assert torch_internals.has_rebuilt_buckets(model) is False
    assert torch_internals.can_reorder_parameters(model) is True
    parameters, expects_sparse = torch_internals.reducer_parameters(model)
    assert [p.shape for p in parameters] == [p.shape for p in model.module.parameters()]
    assert expects_sparse == [False] * 4
    torch_internals.rebuild_reducer(model, parameters[::-1], expects_sparse[::-1])
    torch_internals.push_all_parameters(model)
    assert torch_internals.rebuild_buckets(model) is True
    assert torch_internals.has_rebuilt_buckets(model) is True
    buckets = torch_internals.gradient_buckets(model)
    in_buckets = [id(p) for bucket in buckets for p in bucket.parameters()]
    assert in_buckets == [id(p) for p in parameters[::-1]]


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 records the collectives of NCCL only"
)
def test_the_flight_recorder_has_a_dump_function(process_group: None) -> None:
    assert dump_functions(c10d, "gloo")
    recorder = FlightRecorder()
    assert recorder.refresh() is True
    dist.all_reduce(torch.ones(1))
    assert recorder.counts() != UNKNOWN
    assert list(recorder.groups().values()) == [[0]]
    world: Any = dist.group.WORLD
    assert world._get_sequence_number_for_group() >= 0


def test_norms_of_parameters() -> None:
    norms = torch_internals.parameter_norms([torch.tensor([3.0, 4.0]), torch.zeros(2)])
    assert [float(norm) for norm in norms] == [5.0, 0.0]


def test_a_scheduler_keeps_its_last_rates() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert getattr(scheduler, torch_internals.SCHEDULER_LAST_RATES) == [0.5]


def test_a_metric_has_states_and_counts_its_updates() -> None:
    metric = torchmetrics.MeanMetric()
    assert set(torch_internals.state_names(metric)) == {"mean_value", "weight"}
    assert torch_internals.update_count(metric) == 0
    metric.update(1.0)
    metric.compute()
    torch_internals.mark_restored(metric, 7)
    assert torch_internals.update_count(metric) == 7
    assert metric._computed is None


def test_a_profiler_is_noticed_before_and_while_it_records() -> None:
    began: list[bool] = []
    end = torch_internals.call_before_profilers(
        lambda: began.append(torch_internals.is_profiling())
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_internals.is_profiling()
    end()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass
    assert began == [False]
    assert not torch_internals.is_profiling()


def test_every_function_of_the_adapters_is_checked_here() -> None:
    """A function that is added to an adapter needs a check in this file."""
    source = inspect.getsource(inspect.getmodule(_loader))  # type: ignore[arg-type]
    for module in (lightning_internals, torch_internals):
        own = [
            name
            for name, value in vars(module).items()
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
        ]
        assert own
        for name in own:
            assert f"{module.__name__.rpartition('.')[2]}.{name}(" in source, name


def test_every_batch_of_a_loader_passes_the_wrapped_fetch() -> None:
    fetched: list[int] = []

    def wrap(fetch: Any) -> Any:
        def counted(iterator: Any) -> Any:
            batch = fetch(iterator)
            fetched.append(len(batch))
            return batch

        return counted

    torch_internals.wrap_loader_fetch(wrap)
    try:
        for workers in (0, 1):
            list(_loader(num_workers=workers))
        list(torch.utils.data.DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]
    finally:
        torch_internals.unwrap_loader_fetch()
    list(_loader())
    assert fetched == [1] * 8 + [2] * 3


def test_a_function_is_called_after_the_next_iterator_and_only_then() -> None:
    loader, calls = _loader(), list[int]()
    torch_internals.call_after_iterator(loader, lambda: calls.append(len(calls)))
    for passes in range(2):
        assert calls == [0] * passes
        assert len(list(loader)) == 4
    assert calls == [0]


def test_the_loader_of_fabric_names_the_loader_inside_and_counts_its_passes() -> None:
    inner = _loader()
    fabric = Fabric(accelerator="cpu", devices=1)
    outer = fabric.setup_dataloaders(inner)
    found = lightning_internals.fabric_loader(outer)
    assert isinstance(found, DataLoader)
    assert found.dataset is inner.dataset
    assert lightning_internals.fabric_loader(inner) is None
    assert getattr(outer, lightning_internals.FABRIC_PASSES) == 0
    list(outer)
    assert getattr(outer, lightning_internals.FABRIC_PASSES) == 1
