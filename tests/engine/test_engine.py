"""The engine, on the real vLLM: seeds, queue, log-probabilities, versions."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import model_runner_v2
import pytest
import tiny
import torch

from colograd.batch import FinishReason, ModelInput, Prompt, ScoredGroup
from colograd.engine.arguments import engine_kwargs
from colograd.engine.sampling import (
    RESERVED,
    SUPPORTED,
    UNKNOWN_TOKENS,
    LengthHistory,
    Sampling,
    check_sampling,
    finish_reason_of,
    request_seed,
)
from colograd.engine.vllm_engine import StaleWeights, VLLMEngine
from colograd.policy.packing import loss_tokens

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny.config(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def engine(tiny_model: Path, config):
    from colograd.runtime import process

    process.prepare_ranks()
    before = torch.get_rng_state()
    built = VLLMEngine(str(tiny_model), config, torch.float32, context=64, kv_bytes=2**22)
    built.left_the_random_state_alone = torch.equal(before, torch.get_rng_state())
    built.stamp(0)
    yield built
    built.close()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = tiny.make_tokenizer()
    return [
        Prompt({"prompt": text}, tuple(tokenizer(text).input_ids), position)
        for position, text in enumerate(["one", "twenty two", "three hundred", "4"])
    ]


def sample(engine: VLLMEngine, config, prompts, **changes):
    sampling = Sampling(n=4, max_tokens=12, temperature=1.0, options={})
    groups = engine.generate(prompts, changes.get("sampling", sampling), version=0, seed=changes.get("seed", 7))
    return {group.position: group for group in groups}


def tokens(group) -> list[tuple[int, ...]]:
    return [tuple(rollout.completion_ids) for rollout in group.rollouts]


def test_a_sampled_nan_is_an_error() -> None:
    """An engine with broken kernels goes on sampling, and the trainer would take NaN for an unknown log-probability."""
    completion = SimpleNamespace(index=0, token_ids=[1, 2], logprobs=SimpleNamespace(logprobs=[-0.5, float("nan")]))
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.tokens = engine.vocab_size = 8
    with pytest.raises(FloatingPointError, match="logits that aren't numbers"):
        engine._sampled(SimpleNamespace(outputs=[completion], prompt_logprobs=None), ModelInput((1,)))


def test_a_group_has_n_completions_with_one_logprob_per_token(engine, config, prompts) -> None:
    groups = sample(engine, config, prompts)
    assert sorted(groups) == [0, 1, 2, 3]
    for position, group in groups.items():
        assert len(group.rollouts) == 4 and group.position == position
        for rollout in group.rollouts:
            assert rollout.prompt_ids == prompts[position].prompt_ids
            assert rollout.sampler_logprobs.shape == (len(rollout.completion_ids),)
            assert (rollout.sampler_logprobs <= 0).all() and rollout.sampled.all()
            assert rollout.policy_version == 0
            ended = rollout.completion_ids[-1] == 256  # the end token
            assert rollout.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert ended or len(rollout.completion_ids) == 12


def test_completions_depend_on_the_position_and_not_on_the_batch(engine, config, prompts) -> None:
    together = sample(engine, config, prompts)
    backwards = sample(engine, config, prompts[::-1])
    alone = sample(engine, config, prompts[2:3])
    assert [tokens(together[p]) for p in range(4)] == [tokens(backwards[p]) for p in range(4)]
    assert tokens(alone[2]) == tokens(together[2])


def test_prompts_that_are_read_in_parts_have_the_same_completions(tiny_model: Path, prompts, tmp_path: Path) -> None:
    """vLLM advances a request's random generator between two parts of a prompt, and the engine restores it, on a CPU
    too. Preempted requests, which read their own tokens again, are covered as well."""
    sampling = Sampling(n=4, max_tokens=90, temperature=1.0, options={})
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "block_size": 32, "num_gpu_blocks_override": 14}
    found = []
    for given in ({}, small):
        config = tiny.config(tmp_path / "run", vllm_engine_kwargs=given)
        with contextlib.closing(VLLMEngine(str(tiny_model), config, torch.float32, 128, kv_bytes=2**22)) as other:
            other.stamp(0)
            groups = sample(other, config, prompts, sampling=sampling)
            preemptions = other.load().preemptions
            found.append({position: tokens(group) for position, group in groups.items()})
    assert found[0] == found[1] and preemptions


def test_completions_of_a_group_differ_and_another_seed_gives_others(engine, config, prompts) -> None:
    first, second = sample(engine, config, prompts), sample(engine, config, prompts, seed=8)
    assert len(set(tokens(first[1]))) > 1
    assert tokens(first[1]) != tokens(second[1])


def test_any_of_several_stop_tokens_ends_a_completion_and_is_kept(engine, config, prompts) -> None:
    ends = [*range(0, 256, 8), 256]
    sampling = Sampling(n=8, max_tokens=12, temperature=1.0, options={"stop_token_ids": ends[:-1]})
    rollouts = [r for group in sample(engine, config, prompts, sampling=sampling).values() for r in group.rollouts]
    for rollout in rollouts:
        *before, last = rollout.completion_ids
        assert not {*before} & {*ends} and len(rollout.sampler_logprobs) == len(rollout.completion_ids)
        assert (last in ends) == (rollout.finish_reason is FinishReason.STOP)
    assert len({r.completion_ids[-1] for r in rollouts if r.finish_reason is FinishReason.STOP} - {256}) > 1


def test_any_of_several_stop_strings_ends_a_completion_whose_tokens_are_kept(engine, config, prompts) -> None:
    decode = tiny.make_tokenizer().decode
    stops = [chr(code) for code in range(33, 60)]
    sampling = Sampling(n=8, max_tokens=12, temperature=1.0, options={"stop": stops})
    rollouts = [r for group in sample(engine, config, prompts, sampling=sampling).values() for r in group.rollouts]
    ended = [r for r in rollouts if r.finish_reason is FinishReason.STOP and r.completion_ids[-1] != 256]
    texts = [decode(list(rollout.completion_ids)) for rollout in ended]
    assert len({text[-1] for text in texts}) > 1
    assert all(text[-1] in stops and not {*text[:-1]} & {*stops} for text in texts)
    for rollout in rollouts:
        if rollout.finish_reason is FinishReason.LENGTH:
            assert len(rollout.completion_ids) == 12


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"regex": "[ab]{2,4}!"}, lambda text: re.fullmatch("[ab]{2,4}!", text)),
        ({"json": {"enum": ["yes", "no", 7]}}, lambda text: json.loads(text) in ("yes", "no", 7)),
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
    ],
)
def test_completions_match_the_structure_that_is_asked_for(engine, prompts, tmp_path, constraint, matches) -> None:
    tokenizer = tiny.make_tokenizer()
    kwargs = {"structured_outputs": constraint}
    config = tiny.config(tmp_path, generation_kwargs=kwargs, vllm_importance_sampling_correction=False)
    check_sampling(config)
    groups = sample(engine, config, prompts, sampling=Sampling.for_training(config))
    texts = []
    for rollout in (r for group in groups.values() for r in group.rollouts):
        assert rollout.finish_reason is FinishReason.STOP and rollout.sampler_logprobs.isfinite().all()
        texts.append(tokenizer.decode(list(rollout.completion_ids), skip_special_tokens=True))
        assert matches(texts[-1]), texts[-1]
    assert len(set(texts)) > 1


def test_trl_s_name_for_a_regex_is_the_same_constraint(tmp_path) -> None:
    off = {"vllm_importance_sampling_correction": False}
    by_name = tiny.config(tmp_path, vllm_structured_outputs_regex="[ab]+", **off)
    by_kwargs = tiny.config(tmp_path, generation_kwargs={"structured_outputs": {"regex": "[ab]+"}}, **off)
    assert Sampling.for_training(by_name).options == Sampling.for_training(by_kwargs).options
    by_kwargs.vllm_structured_outputs_regex = "x"
    with pytest.raises(ValueError, match="set the same option of vLLM"):
        check_sampling(by_kwargs)
    by_name.vllm_structured_outputs_regex, by_name.generation_kwargs = None, {"structured_outputs": {"xml": "x"}}
    with pytest.raises(ValueError, match="`structured_outputs` has the key 'xml': use only the keys json"):
        check_sampling(by_name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"generation_kwargs": {"structured_outputs": {"regex": "(ab"}}}, "aren't valid for vLLM: .*regex"),
        ({"generation_kwargs": {"structured_outputs": {"json": '{"type": 3}'}}}, "aren't valid for vLLM: .*"),
        ({"generation_kwargs": {"allowed_token_ids": [999]}}, "aren't valid for vLLM: .*out-of-vocab"),
        ({"generation_kwargs": {"structured_outputs": {"regex": "[ab]+"}, "stop": ["a"]}}, None),
    ],
)
def test_what_vllm_would_refuse_of_a_request_is_known_before_any(engine, tmp_path, settings, said) -> None:
    config = tiny.config(tmp_path, vllm_importance_sampling_correction=False, **settings)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        engine.check(Sampling.for_training(config))
    assert not engine.core.has_unfinished_requests()


# Sampling parameters of vLLM that `generation_kwargs` may not set.
REFUSED = (
    "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start",
    "skip_reading_prefix_cache", "stream_interval", "trace_decode_token_ids", "watermarking", "skip_clone",
    "output_text_buffer_length",
)  # fmt: skip


def test_every_sampling_field_is_supported_reserved_or_refused(tmp_path) -> None:
    """This test fails if a new vLLM adds a sampling field. Sort the new field into one of the three lists."""
    from vllm import SamplingParams

    fields = {name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_")}
    known = [*SUPPORTED, *RESERVED, *REFUSED]
    assert fields <= {*known} and len({*known}) == len(known)
    assert VALUES.keys() == {*SUPPORTED}
    for name in fields & {*REFUSED}:
        with pytest.raises(ValueError, match=f"generation_kwargs sets '{name}', but the trainer doesn't support .*"):
            check_sampling(tiny.config(tmp_path, generation_kwargs={name: 1}))
    with pytest.raises(ValueError, match="sets '_eos_token_id', but the trainer doesn't support this parameter"):
        check_sampling(tiny.config(tmp_path, generation_kwargs={"_eos_token_id": 1}))


VALUES = {
    "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {"65": 1.0}, "min_tokens": 2, "bad_words": ["a"],
    "allowed_token_ids": [*range(60, 80), 256], "structured_outputs": {"regex": "[ab]{2,4}"}, "extra_args": {"own": 1},
    "thinking_token_budget": 4, "stop": ["e"], "stop_token_ids": [*range(0, 256, 8)], "ignore_eos": True,
    "repetition_detection": {"max_pattern_size": 1, "min_count": 2}, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in VALUES if name != "thinking_token_budget"])
def test_every_supported_sampling_field_gives_completions(engine, prompts, tmp_path, name) -> None:
    config = tiny.config(tmp_path, generation_kwargs={name: VALUES[name]})
    check_sampling(config)
    groups = sample(engine, config, prompts, sampling=Sampling.for_training(config))
    for rollout in (rollout for group in groups.values() for rollout in group.rollouts):
        assert 0 < len(rollout.completion_ids) <= 12 and rollout.sampler_logprobs.isfinite().all()


def test_repetition_detection_truncates_a_completion(engine, prompts, tmp_path) -> None:
    repetition = {"max_pattern_size": 1, "min_count": 3}
    allowed = {"allowed_token_ids": [65, 66], "repetition_detection": repetition}
    sampling = Sampling.for_training(tiny.config(tmp_path, generation_kwargs=allowed))
    rollouts = [r for group in sample(engine, None, prompts, sampling=sampling).values() for r in group.rollouts]
    repeated = [r for r in rollouts if r.finish_reason is FinishReason.REPETITION]
    assert repeated and all(len({*r.completion_ids[-3:]}) == 1 for r in repeated)
    for rollout in rollouts:
        assert not loss_tokens(rollout, mask_truncated=True).any() and loss_tokens(rollout, mask_truncated=False).all()


def test_a_thinking_budget_without_reasoning_config_is_refused(engine, tmp_path) -> None:
    config = tiny.config(tmp_path, generation_kwargs={"thinking_token_budget": 4})
    with pytest.raises(ValueError, match=r"aren't valid for vLLM: .*reasoning"):
        engine.check(Sampling.for_training(config))


def test_every_finish_reason_of_vllm_is_known() -> None:
    from vllm.v1.engine import FINISH_REASON_STRINGS

    for name in {*FINISH_REASON_STRINGS} - {"error"}:
        assert finish_reason_of(name) == name
    with pytest.raises(RuntimeError, match="vLLM ended a completion with the finish reason 'error'"):
        finish_reason_of("error")


def test_a_prompt_beyond_the_embedding_is_refused(engine) -> None:
    """vLLM would read one of the rows that pad its embedding to a multiple of 64."""
    with pytest.raises(ValueError, match="the token id 258, but the model's embedding has 258 rows"):
        engine.submit((1, 258), Sampling(1, 4, 1.0, {}), seed=1)
    assert not engine.core.has_unfinished_requests()


def test_sampled_tokens_without_text_are_counted(engine, prompts, monkeypatch) -> None:
    monkeypatch.setattr(engine, "tokens", 128)
    groups = sample(engine, None, prompts)
    ids = [token for group in groups.values() for rollout in group.rollouts for token in rollout.completion_ids]
    assert engine.take_counts()[UNKNOWN_TOKENS] == sum(token >= 128 for token in ids) > 0
    assert UNKNOWN_TOKENS not in engine.take_counts()


def test_neighbouring_positions_share_no_seed_of_a_child() -> None:
    seeds = [request_seed(7, position) + child for position in range(1000) for child in range(16)]
    assert request_seed(7, 0, "train") != request_seed(7, 0, "eval"), "training and evaluation draw differently"
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**63


def test_sampler_and_trainer_agree_on_logprobs_in_float32(engine, config, prompts, tiny_model: Path) -> None:
    """The mean difference of the same tokens' log-probabilities is below 1e-5, packed with a shared prompt."""
    from transformers import AutoModelForCausalLM

    from colograd.policy import attention
    from colograd.policy.logprobs import policy_logprobs
    from colograd.policy.packing import pack

    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation=attention.NAME)
    groups = [ScoredGroup(g, torch.zeros(4, 1), torch.ones(4)) for g in sample(engine, config, prompts).values()]
    (micro_batch,) = pack(groups, 4096, mask_truncated=False, device=torch.device("cpu"))
    logprobs, _ = policy_logprobs(policy, micro_batch, temperature=1.0)
    difference = (logprobs - micro_batch.sampler_logprobs).abs()
    assert difference.mean() < 1e-5, difference.mean()


def test_logprobs_are_those_of_the_sampling_temperature(engine, config, prompts, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    sampling = Sampling(n=2, max_tokens=8, temperature=0.7, options={})
    (rollout, _) = sample(engine, config, prompts[:1], sampling=sampling)[0].rollouts
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logits = policy(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
    torch.testing.assert_close(rollout.sampler_logprobs, expected, rtol=0, atol=1e-4)


def test_the_sampler_draws_from_the_models_distribution(engine, config, prompts) -> None:
    """4,000 first tokens of one prompt: frequencies within 4 standard errors of the reported probabilities."""
    sampling = Sampling(n=1000, max_tokens=1, temperature=1.0, options={})
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for seed in range(4):
        for rollout in sample(engine, config, prompts[:1], sampling=sampling, seed=seed)[0].rollouts:
            token = rollout.completion_ids[0]
            counts[token] = counts.get(token, 0) + 1
            probability[token] = float(rollout.sampler_logprobs[0].exp())
    common = [token for token in counts if probability[token] > 0.01]
    assert common
    for token in common:
        p = probability[token]
        assert abs(counts[token] / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5, (token, counts[token], p)


def test_greedy_completions_are_the_most_probable_tokens(engine, config, prompts, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    sampling = Sampling(n=1, max_tokens=6, temperature=0.0, options={})
    (rollout,) = sample(engine, config, prompts[:1], sampling=sampling)[0].rollouts
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        best = policy(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].argmax(-1)
    assert best.tolist() == list(rollout.completion_ids)


def test_queue_drains_in_fewer_steps_longest_first(engine, config, monkeypatch) -> None:
    """24 completions with 4 running at once. An earlier epoch recorded how long each prompt's completions get."""
    steps = []
    step = engine.core.step
    monkeypatch.setattr(engine.core, "step", lambda: steps.append(1) or step())
    scheduler = engine.core.engine_core.engine_core.scheduler
    places = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
    monkeypatch.setattr(scheduler, places, 4)
    # The context has 64 tokens, so a completion has 64 tokens less the prompt's length.
    sizes = [54, 50, 56, 48, 40, 52, 45, 30, 20, 55, 50, 8]
    prompts = [Prompt({}, tuple(range(position, position + size)), position) for position, size in enumerate(sizes)]
    sampling = Sampling(n=2, max_tokens=64, temperature=1.0, options={"ignore_eos": True})
    history = LengthHistory()
    assert history.longest_first(prompts) == prompts
    taken, epochs = [], []
    for _ in range(2):
        steps.clear()
        epochs.append(sample(engine, config, history.longest_first(prompts), sampling=sampling))
        taken.append(len(steps))
        for group in epochs[-1].values():
            history.add(prompts[group.position].input, [len(rollout.completion_ids) for rollout in group.rollouts])
    assert [p.position for p in history.longest_first(prompts)][:2] == [11, 8]
    assert all(tokens(epochs[0][p]) == tokens(epochs[1][p]) for p in range(12)), "the same rollouts in any order"
    assert taken[1] < 0.9 * taken[0], taken


def test_length_history_is_saved_by_rank(tmp_path: Path) -> None:
    """Prompts without a recorded length count as the mean."""
    history, prompts = LengthHistory(), [Prompt({}, (p,), p) for p in range(4)]
    for position, length in ((0, 10), (1, 90), (3, 20)):
        history.add(prompts[position].input, [length, length])
    history.save(tmp_path, rank=1)
    again = LengthHistory()
    again.load(tmp_path, rank=1)
    for found in (history, again):
        assert [p.position for p in found.longest_first(prompts)] == [1, 2, 3, 0]
    again.load(tmp_path, rank=0)
    assert again.longest_first(prompts) == prompts, "absent: the order of the prompts"


def test_sampling_with_weights_of_another_version_raises(engine, config, prompts) -> None:
    with pytest.raises(StaleWeights, match=r"weights of step 0, but the trainer is at step 1: call `publish`"):
        next(engine.generate(prompts, Sampling(2, 4, 1.0, {}), version=1, seed=0))


def test_unstamped_weights_are_not_sampled_from(engine, config, prompts) -> None:
    engine.invalidate()
    with pytest.raises(StaleWeights, match="weights of no known step, but the trainer is at step 0"):
        next(engine.generate(prompts, Sampling(2, 4, 1.0, {}), version=0, seed=0))
    engine.stamp(0)
    assert sorted(sample(engine, config, prompts)) == [0, 1, 2, 3]


def test_a_request_is_a_model_input_or_its_tokens(engine, prompts) -> None:
    sampling, drawn = Sampling(1, 4, 1.0, {}), []
    for asked in (prompts[1].input, list(prompts[1].prompt_ids)):
        request, finished = engine.submit(asked, sampling, seed=1), []
        while not finished:
            finished = engine.advance()
        ((name, (completion,)),) = finished
        assert name == request
        drawn.append((completion.ids, completion.logprobs))
    assert drawn[0] == drawn[1]


def test_a_generation_closed_early_leaves_nothing_in_flight(engine, config, prompts) -> None:
    groups = engine.generate(prompts, Sampling(4, 12, 1.0, {}), version=0, seed=7)
    next(groups)
    groups.close()
    assert not engine.core.has_unfinished_requests()
    engine.stamp(0)
    assert sorted(sample(engine, config, prompts)) == [0, 1, 2, 3]


def test_weights_can_not_be_stamped_while_completions_are_decoded(engine, config, prompts) -> None:
    engine.submit(prompts[0].prompt_ids, Sampling(1, 4, 1.0, {"ignore_eos": True}), seed=1)
    with pytest.raises(RuntimeError, match="finish or abort them first"):
        engine.stamp(1)
    while engine.core.has_unfinished_requests():
        engine.core.step()
    scheduler = engine.core.engine_core.engine_core.scheduler
    assert scheduler.has_requests(), "what has finished is still to be told to the worker"
    engine.stamp(0)
    assert not scheduler.has_requests(), "vLLM's routed experts don't survive a reset before that"


def test_a_refused_cache_reset_is_an_error(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine.core, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
        engine.stamp(0)
    monkeypatch.undo()
    engine.stamp(0)


@pytest.mark.parametrize("releases", [True, False])
def test_it_sleeps_and_wakes_by_vllm_s_own_rules(engine, config, prompts, monkeypatch, releases) -> None:
    """The scheduler and executor are vLLM's own. Only the worker's unmapping is left out, because a CPU has none."""
    executor = engine.core.model_executor
    theirs, asked = executor.collective_rpc, []

    def collective_rpc(method, *args, **kwargs):
        asked.append(method)
        return None if method in ("discard", "sleep", "wake_up") else theirs(method, *args, **kwargs)

    monkeypatch.setattr(executor, "collective_rpc", collective_rpc)
    monkeypatch.setattr(engine, "sleeps", True)
    if releases and not hasattr(engine.core, "release_kv_cache_memory"):
        pytest.skip("this vLLM can't release the KV cache by name")
    if not releases:
        monkeypatch.delattr(type(engine.core), "release_kv_cache_memory", raising=False)
    before = sample(engine, config, prompts)
    scheduler = engine.core.engine_core.engine_core.scheduler
    if releases and hasattr(scheduler, "aux_output_connector"):  # of router_replay on a GPU, which has demands
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

        scheduler.aux_output_connector = AuxOutputSchedulerConnector()
    engine.sleep()
    assert engine.core.is_sleeping() and ("discard" if releases else "sleep") in asked
    assert executor.sleeping_tags == ({"kv_cache"} if releases else {"kv_cache", "weights"})
    with pytest.raises(AssertionError, match="wake it first"):
        next(engine.generate(prompts, Sampling(2, 4, 1.0, {}), version=0, seed=0))
    engine.stamp(0)  # weights may be published meanwhile
    engine.wake()
    assert not engine.core.is_sleeping() and asked[-1] == "wake_up"
    scheduler.aux_output_connector = None
    after = sample(engine, config, prompts)
    assert [tokens(after[p]) for p in range(4)] == [tokens(before[p]) for p in range(4)]


def test_asynchronous_scheduling_comes_with_model_runner_v2(engine) -> None:
    """Asynchronous scheduling is the default on a GPU. The tests of V2 then have one more step in flight."""
    assert engine.vllm_config.scheduler_config.async_scheduling == model_runner_v2.running()


def test_the_global_random_state_survives_building_an_engine(engine) -> None:
    assert engine.left_the_random_state_alone, "vLLM reseeds with its own seed while it is built"


def test_what_the_trainer_sets_itself_can_not_be_overridden(tiny_model: Path, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, vllm_engine_kwargs={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(ValueError, match=r"logprobs_mode.*remove it"):
        engine_kwargs(str(tiny_model), config, torch.float32, 64, 8)
