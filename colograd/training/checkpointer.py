"""`Checkpointer`: saves checkpoints during training, finds the checkpoint to resume from, and loads it.

A background save copies the tensors into host memory. A thread then writes the copies to the disk while the next steps
train (see `checkpoint.writing`). After each step, the ranks check together whether all threads have finished.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SchedulerType
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint import folders
from ..checkpoint.manifest import files_of
from ..checkpoint.reading import STATE_FILE, loading
from ..checkpoint.search import search
from ..checkpoint.stop_signal import TERMINATED, StopSignal, exit_status
from ..checkpoint.writing import HostFiles, Save, Source, Writer, why_in_foreground
from ..config import GRPOConfig
from ..engine.protocol import after_each_step
from ..parallel import faults
from ..parallel.ranks import Stopped, gather, on_all_ranks, rank, world_size
from ..policy.supported import features
from ..rollout.rounds import PlainRound
from ..sharding.weight_files import float32_weights, load_renamed, load_whole, saved_names
from .adamw_split import AdamWSplit, adopt_masters, join_remainders
from .recorded_settings import run_settings

# Optimizer settings that a resumed run takes from its recipe, not from the checkpoint.
OF_OPTIMIZER = ("initial_lr", "betas", "eps", "weight_decay", "momentum")
RATE_IS_STATE = ("reduce_lr_on_plateau", "greedy")  # Schedules that continue from a checkpoint's learning rate.
PATIENCE = 10.0  # Seconds that a save in the background may take before the next save is skipped.


def end_at_a_signal(args: GRPOConfig, closing: contextlib.ExitStack) -> None:
    """Install signal handlers: outside of training, a stop signal (e.g. SIGTERM) ends all ranks at once.

    Ctrl-C, and signals that the user's script handles, keep their handlers. ``closing`` removes the new handlers."""
    status = args.exit_status_after_stop
    stop = StopSignal.outside_training(args.stop_signals, TERMINATED if status is None else status, faults.tell_stop)
    faults.stop_listeners[:] = [stop.stop]

    def remove() -> None:
        stop.remove()
        faults.stop_listeners[:] = [each for each in faults.stop_listeners if each != stop.stop]

    closing.callback(remove)


class Checkpointer(TrainerCallback):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.args: GRPOConfig = trainer.args
        args, speaks = self.args, trainer.is_world_process_zero()
        status = exit_status(args.exit_status_after_stop, os.environ)
        self.stop_signal = StopSignal(speaks, args.stop_signals, args.stop_within, status)
        self.stop_signal.tell, self.stop_signal.leave = faults.tell_stop, faults.leave
        self._newest = 0  # Step of the last checkpoint that this run began to write, or that it was resumed from.
        self.writer = Writer()
        self.nodes_are_apart = self._resolve_folders()
        self._host_files = HostFiles(self.args.device)
        self._in_background = False
        self._why_in_foreground = ""  # Reason why training waits for a save, as last printed.
        self._is_due = False  # Whether a save is postponed to the end of the round.
        self._failures_in_a_row = 0
        self._best_before: str | None = None  # Folder of the best checkpoint before the running save.
        self._damaged: set[int] = set()  # Optimizer steps of damaged checkpoints.

    def _resolve_folders(self) -> bool:
        """Return whether the nodes share no file system, so that each node writes whole checkpoints."""
        args = self.args
        with on_all_ranks("writing into output_dir"):
            if args.layout.leads_node:
                folders.check_file_system(args.output_dir)
        apart = folders.nodes_are_apart(args.output_dir, args.layout)
        if args.save_on_each_node and args.layout.nodes > 1 and not apart:
            raise ValueError(
                f"save_on_each_node is true, but all nodes share the folder {args.output_dir!r} and would write the "
                "same files. Set `save_on_each_node` to false, or use an `output_dir` that is local to each node."
            )
        args.resolve_saving(apart)
        return apart

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)

    def find(self, wanted: str | bool | None) -> str | None:
        with on_all_ranks("the search for a checkpoint"):
            if self.args.should_save:  # `sweep` may restore a checkpoint that a killed run was replacing
                folders.sweep(self.args.output_dir)
        args, self._is_due, self._failures_in_a_row = self.args, False, 0
        path, self._damaged = search(
            wanted, str(args.output_dir), args.layout, self.nodes_are_apart, self.trainer.console
        )
        return path

    def begin(self, checkpoint: str | None) -> None:
        say, prompts = self.trainer.console.say, self.trainer.train_prompts
        self._newest = 0 if checkpoint is None else folders.step_of(checkpoint)
        if checkpoint is not None:
            say(f"resumed from {os.path.relpath(checkpoint)}: step {folders.step_of(checkpoint) + 1} is next")
            with on_all_ranks("the checkpoint's settings"):
                settings = run_settings(self.args, self.trainer.rewards, self.trainer.feature.digests())
                changed = folders.changed_settings(checkpoint, settings)
                kind = SchedulerType(self.args.lr_scheduler_type).value
                if "learning_rate" in changed and "lr_scheduler_type" not in changed and kind in RATE_IS_STATE:
                    was, now = changed["learning_rate"]
                    raise ValueError(
                        f"learning_rate is {now}, but {checkpoint} was trained with {was}, and "
                        f"`lr_scheduler_type: {kind}` continues from the checkpoint's learning rate: set "
                        f"`learning_rate: {was}`."
                    )
            if changed:
                listed = ", ".join(f"{name} {was!r:.60}, now {now!r:.60}" for name, (was, now) in changed.items())
                say(f"other settings than the checkpoint's hold from here on: {listed}")
        if (choice := prompts.choice) is not None:
            skips = checkpoint is not None and not self.args.ignore_data_skip
            with on_all_ranks("the checkpoint's prompts"):
                choice.load(folders.read_prompts(str(checkpoint), choice.missing) if skips else {})
        if self.nodes_are_apart:
            say(
                f"checkpoints: the {self.args.layout.nodes} nodes share no file system, so each writes whole "
                f"checkpoints into its own {self.args.output_dir}, and a run resumes from the last that all nodes have"
            )

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """At a stop signal, save a checkpoint if possible and end training. Wait for saves when the block ends."""
        self.stop_signal.install()
        listeners = faults.stop_listeners[:]
        faults.stop_listeners[:] = [self.stop_signal.stop]
        ends_by_error, engine = True, getattr(self.trainer, "engine", None)
        sampling = contextlib.nullcontext() if engine is None else after_each_step(engine, self._cut_sampling)
        try:
            try:
                with sampling:
                    yield
            except Stopped:  # A stop signal with a deadline interrupted the round, on all ranks.
                self._save_after_cut()
            self.settle(wait=True)
            ends_by_error = False
            state = self.trainer.state
            if state.global_step >= state.max_steps:
                self.stop_signal.forget_deadline()
        finally:
            faults.stop_listeners[:] = listeners
            self.finish_alone()
            # After an error on one rank, the launcher may send SIGTERM to the others. Only with the handler installed
            # does such a rank print its error. `GRPOTrainer.close` removes the handler.
            if not ends_by_error or world_size() == 1:
                self.stop_signal.remove()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stop_signal = self.stop_signal
        stops, cuts, saves = zip(*gather((stop_signal.received, stop_signal.is_cut, self.writer.state())), strict=True)
        self.settle(wait=False, states=saves)
        stop: str = next(filter(None, stops), "")
        stop_signal.received = stop_signal.received or stop
        pending = self.trainer.learner.pending  # Sampled steps to train before a save, as checkpoints have no rollouts.
        if any(cuts) and pending:
            raise Stopped(f"{stop} interrupted training before the last optimizer step of a round")
        due = self._is_due or control.should_save or bool(stop)
        control.should_save = due and not pending
        self._is_due = due and not control.should_save
        if stop and control.should_save:
            line = f"{stop}: a checkpoint of step {state.global_step} is written, then the run ends."
            self.trainer.console.warn(line)
            control.should_training_stop = True

    def _cut_sampling(self) -> None:
        if self.stop_signal.is_cut:
            raise Stopped(f"{self.stop_signal.received} interrupted the sampling")

    def _save_after_cut(self) -> None:
        """Save the last finished step, unless it is saved already or no run could resume from it. A collective."""
        trainer, step, name = self.trainer, self.trainer.state.global_step, self.stop_signal.received
        self._is_due, trainer.control.should_training_stop = False, True
        saves_no_state = type(trainer.round).save is PlainRound.save  # a cut round's state (if any) is incomplete
        is_new = step > self._newest and not trainer.learner.pending and saves_no_state
        trainer.console.warn(
            f"{name}: the round was cut, as its time is over; the rollout log, unless it is off, has its scored groups"
            + (f", and a checkpoint of step {step} is written" if is_new else "")
        )
        if is_new:
            self.save()
        trainer.is_in_train = False
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_due:  # a callback ended the run within a round, so the postponed save can't happen
            self.trainer.console.warn(
                f"checkpoints: the run was stopped at step {state.global_step}, in the middle of a round. A run can't "
                "resume there, so no checkpoint is written: save_model() saves the weights."
            )

    def save(self) -> bool:
        """Save this step's checkpoint. Return False if the save failed, was skipped or is postponed. A collective."""
        trainer, state, console = self.trainer, self.trainer.state, self.trainer.console
        if trainer.learner.pending:
            self._is_due = True
            return False
        why, stops = self._reason_for_foreground(), trainer.control.should_training_stop or self.stop_signal.received
        is_last = any(gather(bool(stops))) or state.global_step >= state.max_steps
        is_best = bool(state.global_step) and state.best_global_step == state.global_step
        if (present := self.writer.present) is not None and not (why or is_last or is_best):
            self.writer.wait(console.say, max(0.0, PATIENCE - present.seconds))
            self.settle(wait=False)
        else:
            self.settle(wait=True)
        if (present := self.writer.present) is not None:
            console.warn(
                f"checkpoints: step {state.global_step} isn't saved, as {present.final.name} is still being written"
            )
            return False
        self._in_background, self._best_before = not why, state.best_model_checkpoint
        try:
            with on_all_ranks("saving"):
                save = self._assemble()
        except Exception as error:  # one failed save, e.g. by a full disk, needn't end the training
            self._fail(state.global_step, f"{type(error).__name__}: {error}".splitlines()[0])
            return False
        finally:
            self._in_background = False
        self._newest = state.global_step
        self.writer.begin(save, in_background=not why)
        if why or is_last:
            if not self.settle(wait=True):
                return False
            if self.args.push_to_hub:
                trainer._push_from_checkpoint(str(save.final))
        return True

    def _reason_for_foreground(self) -> str:
        """Return the reason why training must wait until this checkpoint is written, or "". A collective call."""
        trainer, optimizer = self.trainer, self.optimizer
        state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        adapter_alone = hasattr(trainer.model, "peft_config")
        saved = (p for p in trainer.model.parameters() if p.requires_grad or not adapter_alone)
        size = state + (sum(p.nbytes for p in saved) if self.args.should_save else 0)
        is_cut = trainer.sharding.cuts_optimizer(optimizer, trainer.sharding.owned())
        callbacks = trainer.callback_handler.callbacks
        mine = why_in_foreground(self.args, callbacks, is_cut, size, self._host_files.nbytes)
        why = next(filter(None, gather(mine)), "")
        if why != self._why_in_foreground and self.args.save_in_background:
            trainer.console.say(f"checkpoints: training waits while one is written, as {why}")
        self._why_in_foreground = why
        return why

    def _assemble(self) -> Save:
        run_dir, state, layout = Path(self.args.output_dir), self.trainer.state, self.args.layout
        name, aside = f"checkpoint-{state.global_step}", run_dir / folders.ASIDE
        best = state.best_global_step
        if best == state.global_step or (best and (run_dir / f"checkpoint-{best}").is_dir()):
            state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        sources: dict[str, Source]
        if self._in_background:  # tensors go to `_host_files`, so the folder gets only small files
            with tempfile.TemporaryDirectory(prefix="colograd-save-", ignore_cleanup_errors=True) as temporary:
                self._write_contents(folder := Path(temporary))
                sources = {name: (folder / name).read_bytes() for name in files_of(folder)}
                for path, image in self._host_files.take().items():
                    sources[path.relative_to(folder).as_posix()] = image
        else:  # this folder is on the file system of the checkpoint, so that files can be moved to the checkpoint
            folder = aside / f"rank-{rank()}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                self._write_contents(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            folders.open_to_readers(folder)
            sources = {name: folder / name for name in files_of(folder)}
        per_node, each_node = layout.ranks_per_node, self.args.save_on_each_node
        first = layout.rank - layout.rank % per_node
        return Save(
            step=state.global_step,
            final=run_dir / name,
            aside=aside / f"{name}.{self.writer.number}",
            sources=sources,
            leads=self.args.should_save,
            leaders=range(0, layout.world_size, per_node) if each_node else (0,),
            members=range(first, first + per_node) if each_node else range(layout.world_size),
            afterwards=functools.partial(self._rotate, state.best_model_checkpoint, state.global_step),
            keeps_old=state.global_step in self._damaged,
        )

    def _write_contents(self, folder: Path) -> None:
        trainer, state = self.trainer, self.trainer.state
        trainer.store_flos()
        trainer.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            trainer._save_optimizer_and_scheduler(str(folder))
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))
        if not self.args.should_save:
            return
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(callback, ExportableState):
                states = state.stateful_callbacks[name := type(callback).__name__]
                if isinstance(states, list):  # the list has the states of several callbacks of one class
                    states.append(callback.state())
                else:
                    state.stateful_callbacks[name] = callback.state()
        state.save_to_json(str(folder / STATE_FILE))
        # Without an index, vLLM loads all *.safetensors files of a folder as weights, the optimizer state too.
        names = [*self.weight_places()]
        if (file := folder / SAFE_WEIGHTS_NAME).is_file():
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = [*opened.keys()]
        if names:  # `names` is empty for an adapter and for weights in several files
            index = {"metadata": {}, "weight_map": dict.fromkeys(names, SAFE_WEIGHTS_NAME)}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1))
        settings = run_settings(self.args, trainer.rewards, trainer.feature.digests())
        (folder / folders.SETTINGS).write_text(json.dumps(settings, indent=1))
        if (choice := trainer.train_prompts.choice) is not None:
            (folder / folders.PROMPTS).write_text(json.dumps(choice.saved))

    def _rotate(self, best: str | None, step: int) -> None:
        damaged, journal = self._damaged - {step}, self.trainer.journal
        folders.rotate(self.args.output_dir, self.args.save_total_limit, best, newest=step, damaged=damaged)
        if journal is not None and self.args.journal == "until_checkpoint":
            # The journal keeps groups sampled since the second-to-last checkpoint, as the last one may be damaged.
            complete = [one for one in folders.complete_steps(self.args.output_dir) if one <= step]
            sound = [one for one in complete if one not in damaged]
            if len(sound) > 1:
                journal.prune(before=sound[-2])

    @property
    def write_tensors(self) -> Any:
        """Function like safetensors' `save_file`. During a background save the function writes to host memory."""
        return self._host_files.put if self._in_background else save_file

    def weight_places(self) -> Mapping[str, torch.Tensor]:
        """Return a background save's buffers in host memory, by weight name; {} if there are none.

        A caller may copy a weight into the buffer of that name. Then `write_tensors` doesn't copy the weight again."""
        return self._host_files.places(SAFE_WEIGHTS_NAME) if self._in_background else {}

    def settle(self, wait: bool, states: Sequence[str | None] | None = None) -> bool:
        """Finish the running save if all ranks have written their files. A collective call.

        Args:
            wait: whether to wait for the save.
            states: `Writer.state` of each rank. None means that this call gathers them.

        Returns:
            False if the save failed or is still running; else True, also if there is no save.
        """
        save = self.writer.present
        if save is None:
            return True
        if wait:
            self.writer.wait(self.trainer.console.say)
        states = gather(self.writer.state()) if states is None or wait else states
        unknown = next((number for number, state in enumerate(states) if state is None), None)
        if unknown is not None and not wait:
            return False
        self.writer.present = None
        self.stop_signal.save_seconds = save.seconds
        error = next(filter(None, states), "")
        if unknown is None:
            shutil.rmtree(save.aside.parent / f"rank-{rank()}", ignore_errors=True)
            with contextlib.suppress(OSError):  # the folder isn't empty while it has other ranks' folders
                save.aside.parent.rmdir()
        else:
            self._host_files = HostFiles(self.args.device)  # new buffers, as the thread may still read the old ones
            error = error or f"rank {unknown} is still writing after {save.seconds:.0f} s"
        if error:
            self._fail(save.step, error)
            return False
        self._failures_in_a_row = 0
        self._damaged.discard(save.step)
        return True

    def finish_alone(self) -> None:
        """Finish the background save without a collective call, because other ranks may have died."""
        if not self.writer.finish_alone():
            self._host_files = HostFiles(self.args.device)

    def _fail(self, step: int, error: str) -> None:
        self._host_files.take()
        self.trainer.state.best_model_checkpoint = self._best_before
        self._failures_in_a_row += 1
        failures, most = self._failures_in_a_row, self.args.save_failures
        if failures >= most:
            raise RuntimeError(
                f"The run ends, because {failures} checkpoints in a row couldn't be written (step {step}: "
                f"{error}; save_failures: {most}). Fix the cause (e.g. a full disk), and resume from the last "
                "complete checkpoint with `resume_from_checkpoint: auto`."
            )
        self.trainer.console.warn(
            f"checkpoints: checkpoint-{step} couldn't be written ({error}): training goes on without it "
            f"({failures} in a row; {most} end the run, save_failures)"
        )

    def load_weights(self, checkpoint: str, usual: Callable[[], None]) -> None:
        policy, model, folder = self.trainer.policy, self.trainer.model, Path(checkpoint)
        with loading(checkpoint, "the model"):
            if policy.adapter is not None:
                for feature in features():
                    feature.check_adapter(policy, checkpoint)
            if self.trainer.sharding.load_weights(folder):
                return
            if policy.adapter is None and policy.processor is not None:
                load_whole(model, checkpoint)
            elif policy.adapter is not None or not load_renamed(model, folder):
                usual()

    def load_optimizer(self, checkpoint: str) -> None:
        """Load optimizer and schedule. The checkpoint's run may have had another number of ranks or sharding strategy.

        Float32 weights and split master weights (see `adamw_split`) are converted into each other without loss."""
        optimizer, sharding, folder = self.optimizer, self.trainer.sharding, Path(checkpoint)
        schedule: Any = self.trainer.lr_scheduler
        made_with = [{name: group[name] for name in OF_OPTIMIZER if name in group} for group in optimizer.param_groups]
        base_rates = getattr(schedule, "base_lrs", None)
        with loading(checkpoint, "the optimizer's state"):
            # `map_location` is the CPU, because torch refuses transformers' choice on several ranks of a CPU.
            read = functools.partial(torch.load, map_location="cpu", weights_only=True)
            if not sharding.load_optimizer(optimizer, folder):
                optimizer.load_state_dict(read(folder / OPTIMIZER_NAME))
            schedule.load_state_dict(read(folder / SCHEDULER_NAME))
            join_remainders(optimizer)
            if isinstance(optimizer, AdamWSplit):
                owned = sharding.owned()
                own = {saved: name for name, saved in saved_names(self.trainer.model).items()}
                names = dict.fromkeys(piece.name for piece in owned) if self.trainer.policy.adapter is None else ()
                masters = ((own.get(name, name), value) for name, value in float32_weights(folder, names))
                adopt_masters(optimizer, owned, masters)
            for group, settings in zip(optimizer.param_groups, made_with, strict=True):
                group |= settings
            # A `LambdaLR` computes the learning rate from the recipe and the number of steps.
            # In any other schedule the learning rate is a part of the state.
            if isinstance(schedule, LambdaLR):
                schedule.base_lrs = base_rates
                rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
                schedule._last_lr = [base * factor(schedule.last_epoch) for base, factor in rates]
                for group, rate in zip(optimizer.param_groups, schedule._last_lr, strict=True):
                    group["lr"] = rate
        sharding.gather_weights()
