"""`transformers.Trainer` whose checkpoints are whole or not there, and are written while training goes on.

transformers writes one into a folder of its own: small files as ever, tensors into images in host memory. From these a
thread makes the checkpoint (see `saving`). What became of it is known at the end of a step, on all ranks: one that
couldn't be written is a warning, and several in a row end the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from ..data import PromptDataset, PromptStream
from ..parallel.ranks import gather, on_all_ranks, rank, world_size
from ..reporting.console import Console
from ..reporting.metrics import PhaseTimes
from ..rollout.journal import Journal
from ..sharding import Sharding
from . import checkpoints, saving
from .host_files import HostFiles
from .journaling import prune_journal
from .save_mode import why_now
from .saving import Save, Saves, Source

PATIENCE = 10.0  # seconds that a checkpoint may take before the next one is left out instead of waiting for it


class SavingTrainer(Trainer):
    """A subclass says when a checkpoint could be resumed from."""

    console: Console
    facts: dict[str, Any]  # for the model card and the journal: recipe, command, dataset
    times: PhaseTimes
    sharding: Sharding
    train_prompts: PromptDataset | PromptStream
    nodes_are_apart: bool
    journal: Journal | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop_signal = checkpoints.StopSignal()
        self.saves = Saves()
        self._images = HostFiles()
        self._beside = False  # whether the checkpoint that is being put together is written beside the training
        self._told_why = ""  # checkpoints are waited for
        self._failures = 0  # in a row
        self._best_before: str | None = None  # the best checkpoint's folder, if the present save fails
        self._save_is_due = False
        self._refused: set[int] = set()  # steps of checkpoints that are damaged

    def at_boundary(self) -> bool:
        """Whether a checkpoint written now could be resumed from."""
        return True

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # -- one checkpoint

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """transformers' checkpoint, on its way to the disk when this returns; at the end of a run it is there."""
        if not self.at_boundary():
            self._save_is_due = True
            return
        self.callback_handler.__dict__.pop("on_save", None)
        why, last = self._why_now(), self._is_last()
        if (present := self.saves.present) is not None and not (why or last or self._is_best()):
            self.saves.wait(self.console.say, max(0.0, PATIENCE - present.seconds))
            self.settle(wait=False)
        else:
            self.settle(wait=True)
        if (present := self.saves.present) is not None:
            self.console.warn(
                f"checkpoints: step {self.state.global_step} isn't saved, as {present.final.name} is still being "
                f"written after {present.seconds:.0f} s"
            )
            self._leave_out_event()
            return
        push, self.args.push_to_hub = self.args.push_to_hub, False  # only of what is complete
        self._beside, self._best_before = not why, self.state.best_model_checkpoint
        try:
            with on_all_ranks("saving"):
                save = self._put_together(model, trial)
        except Exception as error:  # a full disk, say; the other ranks have it too
            self._failed(self.state.global_step, f"{type(error).__name__}: {error}".splitlines()[0])
            self._leave_out_event()
            return
        finally:
            self.args.push_to_hub, self._beside = push, False
        self.saves.begin(save, beside=not why)
        if why or last:
            if not self.settle(wait=True):
                self._leave_out_event()
            elif push:
                self._push_from_checkpoint(str(save.final))

    def _leave_out_event(self) -> None:
        """Have transformers not tell callbacks of a checkpoint that isn't there."""
        handler = self.callback_handler

        def once(args: Any, state: Any, control: Any) -> Any:
            del handler.on_save
            control.should_save = False
            return control

        handler.on_save = once

    def _why_now(self) -> str:
        """Why training waits for this checkpoint; said when it changes. The same on all ranks: a collective."""
        optimizer, owned = self._plain_optimizer, self.sharding.owned()
        state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        adapter_alone = hasattr(self.model, "peft_config")
        saved = (p for p in self.model.parameters() if p.requires_grad or not adapter_alone)
        weights = sum(p.nbytes for p in saved) if self.args.should_save else 0
        is_cut = self.sharding.cuts_optimizer(optimizer, owned)
        mine = why_now(self.args, self.callback_handler.callbacks, is_cut, state + weights, self._images.nbytes)
        why = next(filter(None, gather(mine)), "")
        if why != self._told_why and self.args.save_in_background:
            self.console.say(f"checkpoints: training waits while one is written, as {why}")
        self._told_why = why
        return why

    def _is_last(self) -> bool:
        stops = self.control.should_training_stop or self.stop_signal.received
        return any(gather(bool(stops))) or self.state.global_step >= self.state.max_steps

    def _is_best(self) -> bool:
        """Whether it is the one that the best model is loaded from, which must not be left out."""
        return self.state.best_global_step == self.state.global_step and bool(self.state.global_step)

    def _put_together(self, model: torch.nn.Module, trial: Any) -> Save:
        run_dir, state, layout = Path(self.args.output_dir), self.state, self.args.layout
        name, aside = f"checkpoint-{state.global_step}", checkpoints.aside_folder(run_dir)
        # transformers would look for the best checkpoint beside this one, and wait for all ranks in between.
        best, state.best_global_step = state.best_global_step, None
        with self._own_folder(aside) as folder:
            self._get_output_dir = lambda trial=None: str(folder)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                del self._get_output_dir
                state.best_global_step = best
            if best == state.global_step or (best and (run_dir / f"checkpoint-{best}").is_dir()):
                state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
            if self.args.should_save:
                state.save_to_json(str(folder / name / "trainer_state.json"))
                if names := self._weights_of(folder / name):
                    checkpoints.write_index(folder / name, names)
                if isinstance(self.train_prompts, PromptStream):
                    checkpoints.write_prompts(folder / name, self.train_prompts.state)
            sources = self._sources(folder / name)
        per_node, ranks = layout.ranks_per_node, world_size()
        each = self.args.save_on_each_node
        first = rank() - rank() % per_node
        return Save(
            step=state.global_step,
            final=run_dir / name,
            aside=aside / f"{name}.{self.saves.number}",
            sources=sources,
            leads=self.args.should_save,
            leaders=range(0, ranks, per_node) if each else (0,),
            members=range(first, first + per_node) if each else range(ranks),
            afterwards=functools.partial(self._rotate, state.best_model_checkpoint, state.global_step),
            keeps_old=state.global_step in self._refused,
        )

    @contextlib.contextmanager
    def _own_folder(self, aside: Path) -> Iterator[Path]:
        """Where this rank's files are put: in passing on a local disk, or beside their place in the run's folder."""
        if self._beside:
            with tempfile.TemporaryDirectory(prefix="colograd-save-", ignore_cleanup_errors=True) as folder:
                yield Path(folder)
            return
        own = aside / f"rank-{rank()}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        try:
            yield own
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise

    def _sources(self, folder: Path) -> Mapping[str, Source]:
        if not folder.is_dir():  # of a rank that has nothing to say
            return {}
        if not self._beside:
            return saving.files_in(folder)
        images = self._images.take()
        return saving.contents_of(folder) | {path.relative_to(folder).as_posix(): i for path, i in images.items()}

    def _weights_of(self, folder: Path) -> list[str]:
        """Names of the weights that were just put into one file of ``folder``; none, of an adapter or of shards."""
        file = folder / SAFE_WEIGHTS_NAME
        if not file.is_file():
            return [*self.weight_places()]
        with safe_open(file, framework="pt", device="cpu") as opened:
            return [*opened.keys()]

    def _rotate(self, best: str | None, step: int) -> None:
        """In the thread, when every node has the new one."""
        limit, refused = self.args.save_total_limit, self._refused - {step}
        checkpoints.rotate(self.args.output_dir, limit, best, newest=step, refused=refused)
        if self.journal is not None and self.args.journal == "until_checkpoint":
            prune_journal(self.journal, step, refused)

    # -- its tensors

    @property
    def write_tensors(self) -> Any:
        """As `safetensors.torch.save_file`: what a checkpoint's tensors are written with."""
        return self._images.put if self._beside else save_file

    def weight_places(self) -> Mapping[str, torch.Tensor]:
        """Where in host memory the weights may be copied to, by name; as far as it is known yet."""
        return self._images.places(SAFE_WEIGHTS_NAME) if self._beside else {}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self._images.in_place_of_files() if self._beside else contextlib.nullcontext():
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in transformers; each rank writes its own part of an optimizer that is shared out."""
        optimizer, folder, leads = self._plain_optimizer, Path(output_dir), self.args.should_save
        if not self.sharding.save_optimizer(optimizer, folder, leads, self.write_tensors):
            super()._save_optimizer_and_scheduler(output_dir)
        elif leads:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # -- what became of it

    def settle(self, wait: bool, states: Sequence[str | None] | None = None) -> bool:
        """Learn what became of the checkpoint on its way, if all ranks know by now. A collective.

        Args:
            states: of the ranks, where they have told each other already.

        Returns:
            Whether it is there; also if none was on its way.

        Raises:
            RuntimeError: it is one too many that couldn't be written.
        """
        save = self.saves.present
        if save is None:
            return True
        if wait:
            self.saves.wait(self.console.say)
        found = gather(self.saves.state()) if states is None or wait else states
        unknown = next((number for number, state in enumerate(found) if state is None), None)
        if unknown is not None and not wait:
            return False
        self.saves.present = None
        error = next(filter(None, found), "")
        if unknown is None:
            self._tidy(save.aside.parent)
        else:
            self._images = HostFiles()  # whose memory is still being written from
            error = error or f"rank {unknown} is still writing after {save.seconds:.0f} s"
        if error:
            self._failed(save.step, error)
            return False
        self._failures = 0
        self._refused.discard(save.step)
        return True

    @staticmethod
    def _tidy(aside: Path) -> None:
        """Leave nothing of this rank's where checkpoints are put together."""
        shutil.rmtree(aside / f"rank-{rank()}", ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank's is there
            aside.rmdir()

    def _finish_alone(self) -> None:
        if not self.saves.finish_alone():
            self._images = HostFiles()

    def _failed(self, step: int, error: str) -> None:
        self._images.take()
        self.state.best_model_checkpoint = self._best_before
        self._failures += 1
        most = self.args.save_failures
        if self._failures >= most:
            raise RuntimeError(
                f"The last {self._failures} checkpoints couldn't be written (that of step {step}: {error}), and the "
                f"run ends (save_failures: {most}). Those before are whole: make room, and go on with "
                "resume_from_checkpoint: auto."
            )
        self.console.warn(
            f"checkpoints: that of step {step} couldn't be written ({error}): training goes on without it "
            f"({self._failures} in a row; {most} end the run, save_failures)"
        )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which then deletes checkpoints and loads the best one: those that are there."""
        self.settle(wait=True)
        return super()._finalize_training(*args, **kwargs)
