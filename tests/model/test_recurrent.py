"""Claims about layers with a state: each row of a tree reads the state of its own path alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    HYBRIDS,
    TEXT,
    VOCAB,
    backbone,
    left_padded,
    qwen35,
    random_tree,
    text_input,
    timed_frames_input,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from lab.reference import Oracle
from saccade.core import tree as trees
from saccade.core.prompt import Prompt, Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain, path
from saccade.model import recurrent
from saccade.model.recurrent import (
    CHUNK,
    DeltaRows,
    GatedDelta,
    GatedDeltaByGroups,
    LayerStates,
    Mixer,
    ShortConvolution,
    State,
    StateRows,
    Updates,
    Writes,
    read_text,
    score_tree,
)
from saccade.model.session import Session

HEADS, KEY, VALUE = 3, 4, 5
ROUNDING = 1e-3  # Of probabilities. Wrong states move them by more than 1e-2.
CLOSE = dict(atol=2e-5, rtol=1e-4)


# -- the delta rule ----------------------------------------------------------------------------


def _random_rows(count: int, seed: int, lasting: float = 1.0) -> DeltaRows:
    """Rows as a layer makes them: normalised keys, scaled queries, negative decays."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise)

    q, k = normal(HEADS, count, KEY), normal(HEADS, count, KEY)
    return DeltaRows(
        q / q.norm(dim=-1, keepdim=True) * KEY**-0.5,
        k / k.norm(dim=-1, keepdim=True),
        normal(HEADS, count, VALUE),
        torch.rand(HEADS, count, generator=noise),
        -lasting * torch.rand(HEADS, count, generator=noise),
    )


def _random_memory(seed: int) -> Tensor:
    return torch.randn(HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(seed))


def _by_transformers(rows: DeltaRows, memory: Tensor) -> tuple[Tensor, Tensor]:
    """What the recurrence of transformers reads in a line of rows, and its memory after them."""
    own_q = rows.q * KEY**0.5  # It scales queries itself.
    parts = (own_q, rows.k, rows.v, rows.decay, rows.beta)
    q, k, v, g, beta = (part.transpose(0, 1)[None] for part in parts)
    out, last = torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=memory[None], output_final_state=True
    )
    return out[0].transpose(0, 1), last[0]


def _pick(rows: DeltaRows, places: list[int]) -> DeltaRows:
    return DeltaRows(*(getattr(rows, name)[:, places] for name in ("q", "k", "v", "beta", "decay")))


def _nothing_written(rows: DeltaRows) -> Writes:
    return Writes(rows.k[:, :0], rows.v[:, :0], rows.decay[:, :0])


def _score_in_parts(rows: DeltaRows, memory: Tensor, tree: Tree, cuts: list[int]) -> Any:
    """What a tree's rows read where they arrive in several forwards, and all they write."""
    writes, reads = _nothing_written(rows), []
    for start, stop in zip([0, *cuts], [*cuts, len(tree)], strict=True):
        mask = trees.ancestors(tree.parents)[start:stop, :stop]
        read, writes = score_tree(rows.rows(slice(start, stop)), memory, writes, mask)
        reads.append(read)
    return torch.cat(reads, 1), writes


@settings(max_examples=25)
@given(
    count=st.sampled_from([1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 9]),
    seed=st.integers(0, 10_000),
    lasting=st.sampled_from([1e-3, 0.3, 3.0, 30.0]),
)
def test_text_is_read_as_by_the_recurrence(count, seed, lasting):
    """Claim: in chunks, rows of text read and write what one step a token does, whatever the
    length, and whether the memory lasts for a thousand tokens or for less than one.

    Fails if a chunk's border loses a decay, or a row that pads the last chunk writes something.
    """
    rows, memory = _random_rows(count, seed, lasting), _random_memory(seed)
    read, last = read_text(rows, memory)
    expected, expected_last = _by_transformers(rows, memory)
    assert torch.allclose(read, expected, **CLOSE)
    assert torch.allclose(last, expected_last, **CLOSE)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 14),
    lasting=st.sampled_from([1e-3, 0.3, 3.0]),
)
def test_a_row_of_a_tree_reads_its_own_path_alone(seed, nodes, lasting):
    """Claim: each node of any tree reads what the recurrence of transformers reads at the end of
    the node's path, in however many forwards the nodes arrive.

    Fails if a sibling is read, an ancestor of an earlier forward left out, or a decay counted for
    a row that is not on the path.
    """
    rng = random.Random(seed)
    tree = random_tree(rng, nodes, lambda: rng.randrange(9))
    rows, memory = _random_rows(nodes, seed, lasting), _random_memory(seed)
    cuts = sorted(rng.sample(range(1, nodes), rng.randint(0, min(3, nodes - 1))))
    read, writes = _score_in_parts(rows, memory, tree, cuts)
    assert writes.keys.shape[1] == nodes
    for node in range(nodes):
        line = [*path(tree, node)]
        expected, last = _by_transformers(_pick(rows, line), memory)
        assert torch.allclose(read[:, node], expected[:, -1], **CLOSE)
        assert torch.allclose(writes.apply(memory, torch.tensor(line)), last, **CLOSE)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), nodes=st.integers(2, 12), lasting=st.sampled_from([0.01, 2.0]))
def test_what_follows_an_accepted_part_of_a_chain_stays_scored(seed, nodes, lasting):
    """Claim: after any accepted part of a chain, however often, the writes of its other rows are
    those from the memory at the part's end: they lead to the same memory, and rows that are
    scored behind them read what the recurrence reads.
    """
    rng = random.Random(seed)
    tree = chain(range(nodes))
    rows, memory = _random_rows(nodes + 1, seed, lasting), _random_memory(seed)
    _, writes = _score_in_parts(rows, memory, tree, [])
    start = 0
    while start < nodes - 1:
        step = rng.randint(1, nodes - 1 - start)
        accepted = torch.arange(step)
        memory, writes = writes.apply(memory, accepted), writes.after(range(step))
        start += step
        _, expected = _by_transformers(rows.rows(slice(0, start)), _random_memory(seed))
        assert torch.allclose(memory, expected, **CLOSE)
    left = nodes - start
    mask = torch.ones(1, left + 1, dtype=torch.bool)
    read, _ = score_tree(rows.rows(slice(nodes, nodes + 1)), memory, writes, mask)
    expected, _ = _by_transformers(rows, _random_memory(seed))
    assert torch.allclose(read[:, -1], expected[:, -1], **CLOSE)


# -- whole layers ------------------------------------------------------------------------------


def _delta_net(kind: str, seed: int) -> tuple[Any, Mixer]:
    sizes = dict(
        hidden_size=24,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        num_hidden_layers=4,
    )
    module: Any
    mixer: type[Mixer]
    if kind == "qwen3_next":
        module, mixer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0), GatedDeltaByGroups
    elif kind == "qwen3_5":
        module, mixer = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**sizes), 0), GatedDelta
    else:
        config = Lfm2Config(
            hidden_size=24,
            num_hidden_layers=1,
            conv_L_cache=3,
            conv_bias=True,
            layer_types=["conv"],
        )
        module, mixer = Lfm2ShortConv(config, 0), ShortConvolution
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.5, generator=noise)
    return module.eval(), mixer(module)


KINDS = ("qwen3_next", "qwen3_5", "lfm2")


def _rows_of(
    states: LayerStates, committed_rows: int, tree: Tree, known: int, start: int = 0
) -> StateRows:
    mask = trees.ancestors(tree.parents)[known:]
    stop = start + committed_rows + len(tree) - known
    return StateRows(states, start, stop, committed_rows, known, mask)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_a_layer_is_its_own_module_along_every_path(kind, seed):
    """Claim: text in any pieces, then a tree in any pieces, then an accepted path, then more text:
    a layer gives for each row what its module of transformers gives for the row's text and path.

    Fails if the grouped projection is read in another order, the convolution reads an input beside
    its path or one place off, or a state is kept that the path did not make.
    """
    rng = random.Random(seed)
    module, mixer = _delta_net(kind, seed % 3)
    noise = torch.Generator().manual_seed(seed)
    states = LayerStates([mixer.empty(torch.float32)])
    text = torch.randn(0, 24, generator=noise)

    def exact(inputs: Tensor) -> Tensor:
        return module(inputs[None])[0][-1]

    with torch.no_grad():
        for _ in range(3):
            count = rng.choice([0, 1, 2, 5])
            tree = random_tree(rng, rng.randint(0, 6), lambda: rng.randrange(9))
            cut = rng.randint(0, len(tree))
            new = torch.randn(count + len(tree), 24, generator=noise)
            text, nodes = torch.cat([text, new[:count]]), new[count:]
            out = new[:0]
            for known, stop, committed_rows in ((0, cut, count), (cut, len(tree), 0)):
                part = Tree(tree.tokens[:stop], tree.parents[:stop], tree.q[:stop])
                hidden = new[:count] if committed_rows else new[:0]
                hidden = torch.cat([hidden, nodes[known:stop]])
                if len(hidden):
                    rows = _rows_of(states, committed_rows, part, known)
                    out = torch.cat([out, mixer.run(hidden, [rows], 0)])
                states.advance(committed_rows)
            for row in range(count):
                before = text[: len(text) - count + row + 1]
                assert torch.allclose(out[row], exact(before), atol=1e-4)
            for node in range(len(tree)):
                line = [*path(tree, node)]
                expected = exact(torch.cat([text, nodes[line]]))
                assert torch.allclose(out[count + node], expected, atol=1e-4)
            if len(tree):
                line = [*path(tree, rng.randrange(len(tree)))]
                line = line[: rng.randint(0, len(line))]
                states.commit_path(line)
                text = torch.cat([text, nodes[line]])
            assert states.length == len(text)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), past=st.integers(1, 4), nodes=st.integers(1, 10))
def test_a_convolution_reads_the_last_inputs_of_a_path(seed, past, nodes):
    """Claim: the places that a node's convolution reads are those that conv1d reads at the end of
    its path, and the window after any path holds the last inputs of it.
    """
    rng = random.Random(seed)
    tree = random_tree(rng, nodes, lambda: rng.randrange(9))
    noise = torch.Generator().manual_seed(seed)
    window = torch.randn(past, 3, generator=noise)
    inputs = torch.randn(nodes, 3, generator=noise)
    weight = torch.randn(3, 1, past + 1, generator=noise)
    known = rng.randint(0, nodes - 1)
    rows = _rows_of(LayerStates([State(window)]), 0, tree, known)
    taps = torch.cat([window, inputs])[rows.taps(past)]
    for node in range(nodes):
        line = torch.tensor([*path(tree, node)])
        whole = torch.cat([window, inputs[line]])
        exact = conv1d(whole.T[None], weight, groups=3)[0, :, -1]
        if node >= known:
            mine = (taps[node - known] * weight[:, 0].T).sum(0)
            assert torch.allclose(mine, exact, **CLOSE)
        assert torch.equal(Updates(inputs).apply(State(window), line).window, whole[-past:])


# -- lengths to which states go back -----------------------------------------------------------


def test_states_of_an_accepted_path_and_of_snapshots_can_be_had_again():
    """Claim: a text can be cut back to every token of the path accepted last, to each snapshot and
    to nothing, and each state is the one that there was at that length.

    Fails if a snapshot is taken at another length, or states after a cut are still offered.
    """
    noise = torch.Generator().manual_seed(0)
    states = LayerStates([State(torch.zeros(2, 1))])
    inputs = torch.randn(20, 1, generator=noise)
    whole = torch.cat([torch.zeros(2, 1), inputs])

    def read(count: int) -> None:
        for row in range(count):
            at = states.length + row
            base = states.base(0)
            window = torch.cat([base.window, inputs[at : at + 1]])[-2:]
            states.store_committed(0, State(window))
        states.advance(count)

    read(5)
    states.snapshot()
    read(4)
    states.put(0, Updates(inputs[9:13]))
    states.commit_path([0, 1, 2])
    assert [states.nearest(n) for n in range(13)] == [0] * 5 + [5] * 4 + [9, 10, 11, 12]
    for length in (12, 11, 10, 9, 5, 0):
        assert torch.equal(states.at(length)[0].window, whole[length : length + 2])
    other = states.copy()
    other.truncate(10)
    assert (states.length, other.length) == (12, 10)
    assert torch.equal(other.states[0].window, whole[10:12])
    other.truncate(5)
    assert [other.nearest(n) for n in (4, 5, 6)] == [0, 5, 5]
    with pytest.raises(AssertionError, match="no state of 4 tokens"):
        other.truncate(4)


# -- sessions ----------------------------------------------------------------------------------

THREE = {
    "qwen3_5": left_padded(
        [
            timed_frames_input(0, after=44),
            timed_frames_input(1, (1, 4, 6), before=2),
            timed_frames_input(2, after=11),
        ]
    ),
    "lfm2": left_padded([text_input(i, 3 + 22 * i) for i in range(3)]),
}


class Conversations(Oracle):
    """An oracle whose text can be cut back too, into the prompt as well."""

    def start_turn(self, turns: dict[int, Turn]) -> None:
        for number, turn in turns.items():
            prompt, text = self.prompts[number], self.committed[number]
            from_prompt = max(0, turn.drop - len(text))
            self.committed[number] = [*text[: max(0, len(text) - turn.drop)], *turn.ids]
            if from_prompt:
                self.prompts[number] = _cut(prompt, len(prompt) - from_prompt)


def _cut(prompt: Prompt, length: int) -> Prompt:
    rows = torch.arange(len(prompt)) < length
    dropped = len(prompt) - length
    cut = replace(prompt.keep_rows(rows), next_position=prompt.next_position - dropped)
    return replace(cut, full_ids=prompt.full_ids[:length])


def _rows(scores: Any) -> Tensor:
    return torch.stack(list(scores.rows))


def _assert_equal_laws(session: Session, oracle: Oracle, scored: dict[int, Tree]) -> None:
    ours, truth = session.score(scored), oracle.score(scored)
    for request in scored:
        assert list(ours[request].context) == list(truth[request].context)
        mine, exact = _rows(ours[request]).softmax(-1), _rows(truth[request]).softmax(-1)
        assert mine.shape == exact.shape == (len(scored[request]) + 1, VOCAB)
        assert (mine - exact).abs().max() < ROUNDING


def _emitted(rng: random.Random, tree: Tree) -> list[int]:
    """Part of a branch of the tree, then perhaps tokens that are not in it."""
    tokens: list[int] = []
    if len(tree) and rng.random() < 0.75:
        branch = path(tree, rng.randrange(len(tree)))
        tokens = [tree.tokens[n] for n in branch[: rng.randint(1, len(branch))]]
    return tokens + [rng.randrange(TEXT) for _ in range(rng.randint(0 if tokens else 1, 2))]


def _random_growth(rng: random.Random, left: Tree) -> Tree:
    """Any tree, often a chain; one that goes on with a chain that was accepted in part."""
    if len(left) or rng.random() < 0.4:
        return chain([*left.tokens, *(rng.randrange(9) for _ in range(rng.randint(0, 6)))])
    return random_tree(rng, rng.randint(0, 7), lambda: rng.randrange(9))


def _history(family: str, seed: int, rounds: int = 6) -> None:
    """Random trees, commits and turns of three requests, against the oracle throughout."""
    rng = random.Random(seed)
    model = backbone(HYBRIDS[family]())
    prompts = model.prompts(THREE[family])
    rules = [Sampling()] * 3
    session = Session(model, rules, chunk=rng.choice([9, 2048]))
    oracle = Conversations(model.model, prompts, rules)
    session.prefill(prompts)
    # A conversation is never cut back further than the text after the last picture.
    tails = {n: len(prompt.text_after()) - 1 for n, prompt in enumerate(prompts)}
    for _ in range(rounds):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        if rng.random() < 0.35:
            turns = {}
            for number in chosen:
                most = tails[number] + len(oracle.committed[number])
                ids = tuple(rng.randrange(TEXT) for _ in range(rng.randint(0, 5)))
                turns[number] = Turn(rng.randint(0, min(40, most)), ids)
            before = {n: len(oracle.committed[n]) for n in chosen}
            session.start_turn(turns, rules)
            oracle.start_turn(turns)
            for number, turn in turns.items():
                tails[number] -= max(0, turn.drop - before[number])
            continue
        # What is left of a chain that was accepted in part stays scored.
        scored = {r: _random_growth(rng, session.requests[r].tree) for r in chosen}
        if rng.random() < 0.3:  # The tree grows, and may change its mind about its last nodes.
            _assert_equal_laws(session, oracle, {r: Tree(
                tree.tokens[:3], tree.parents[:3], tree.q[:3]
            ) for r, tree in scored.items()})  # fmt: skip
        _assert_equal_laws(session, oracle, scored)
        emitted = {r: _emitted(rng, scored[r]) for r in chosen}
        session.commit(emitted)
        oracle.commit(emitted)
    _assert_equal_laws(session, oracle, {r: Tree() for r in range(3)})


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
@settings(max_examples=3)
@given(seed=st.integers(0, 10_000))
def test_any_history_of_a_hybrid_equals_the_oracle(family, seed):
    """Claim: over random trees, commits and turns that cut up to 40 tokens back, three requests of
    different lengths keep the laws of a model that recomputes everything (1e-3).

    Fails if a state of a rejected row is kept, a state is of another length than the text, or a
    tree is scored from the wrong one.
    """
    _history(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_many_histories_of_a_hybrid_equal_the_oracle(family):
    """The claim above over 300 longer histories."""
    for seed in range(20_000, 20_300):
        _history(family, seed, 12)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("bug", ["rejected", "window", "decay"])
def test_control_planted_bugs_of_states_are_seen(bug, monkeypatch):
    """Control: the comparison above fails where the state of a rejected row is kept, the window
    is a token old, or the decay up to an accepted row is counted twice."""
    if bug == "rejected":
        commit_path = LayerStates.commit_path

        def commit_all(self: LayerStates, path: Any) -> None:
            updates = next(each for each in self._updates if each is not None)
            commit_path(self, range(len(updates.inputs)) if path else path)
            self.length += len(path) - len(updates.inputs) if path else 0

        monkeypatch.setattr(LayerStates, "commit_path", commit_all)
    elif bug == "window":
        apply = Updates.apply
        monkeypatch.setattr(
            Updates,
            "apply",
            lambda self, state, line=None: replace(apply(self, state, line), window=state.window),
        )
    else:
        after = Writes.after

        def not_rebased(self: Writes, line: Any) -> Writes:
            return replace(after(self, line), total_decay=self.total_decay[:, line[-1] + 1 :])

        monkeypatch.setattr(Writes, "after", not_rebased)
    with pytest.raises(AssertionError):
        for seed in range(40):
            _history("qwen3_5", seed, 12)


def test_a_fork_goes_on_after_a_turn_right_behind_a_score():
    """Claim: a draft that scored its pending tokens, and then is given a turn before any commit,
    goes on with the rows it copied and the source's states. Fails if it asks for states of its own
    that were there before it computed those tokens."""
    model = backbone(qwen35())
    prompts = model.prompts(timed_frames_input(0))
    rules = [Sampling()]
    target, fork = Session(model, rules), Session(model, rules)
    oracle = Conversations(model.model, prompts, rules)
    fork.fork(target.prefill(prompts), prompts)
    for turn in (Turn(0, (7, 8)), Turn(1, (9,)), Turn(3, (4, 5))):
        target.score({0: chain([1, 2, 3])})
        for session in (target, fork, oracle):
            session.commit({0: [1, 2, 6]})
        _assert_equal_laws(fork, oracle, {0: chain([3])})
        for each in (target, fork):
            each.start_turn({0: turn}, rules)
        oracle.start_turn({0: turn})
        for each in (target, fork):
            _assert_equal_laws(each, oracle, {0: chain([5, 6])})


@pytest.mark.extra
@settings(max_examples=4)
@given(seed=st.integers(0, 10_000))
def test_a_fork_of_a_hybrid_keeps_up_with_its_source(seed):
    """Claim: a fork over everything equals the oracle after any commits and turns, its source's
    first, whether or not it computed rows of its own in between."""
    rng = random.Random(seed)
    model = backbone(qwen35())
    prompts = model.prompts(THREE["qwen3_5"])
    rules = [Sampling()] * 3
    target, fork = Session(model, rules), Session(model, rules)
    oracle = Conversations(model.model, prompts, rules)
    fork.fork(target.prefill(prompts), prompts)
    for _ in range(6):
        scored = {r: _random_growth(rng, Tree()) for r in range(3)}
        if rng.random() < 0.8:
            target.score(scored)
        if rng.random() < 0.8:
            _assert_equal_laws(fork, oracle, {r: chain([rng.randrange(9)]) for r in range(3)})
        if rng.random() < 0.7:
            emitted = {r: _emitted(rng, scored[r]) for r in range(3)}
            for session in (target, fork, oracle):
                session.commit(emitted)
        if rng.random() < 0.5:  # Perhaps right after a score, with nothing committed in between.
            turns = {
                r: Turn(
                    rng.randint(0, min(40, len(oracle.committed[r]))),
                    tuple(rng.randrange(TEXT) for _ in range(rng.randint(0, 4))),
                )
                for r in range(3)
            }
            for each in (target, fork):
                each.start_turn(turns, rules)
            oracle.start_turn(turns)
    _assert_equal_laws(fork, oracle, {r: Tree() for r in range(3)})


def test_a_text_is_never_cut_back_to_before_a_picture():
    """Claim: however often later questions are remembered, the states at the end of a prompt's
    pictures are: text is read again from there, and a picture cannot be. The newest are too.

    Fails if a conversation whose second picture came later goes back to before that picture.
    """
    states = LayerStates([State(torch.zeros(2, 1))])
    pictures_end = 0
    for prompt in range(1, 8):
        start = states.length
        cuts = [start + 10, start + 20, start + 30]
        pictures_end = cuts[0] if prompt in (1, 4) else pictures_end
        spared = {pictures_end, *cuts[1:]}
        for cut in cuts:
            states.advance(cut - states.length)
            if cut in spared:
                states.snapshot(spared)
        known = {n for n in range(1, states.length + 1) if states.nearest(n) == n}
        assert spared <= known and len(known) <= recurrent.MAX_SNAPSHOTS
        assert 10 in known


def test_a_states_bytes_are_those_that_are_planned_for():
    """Claim: what a request's states take is never more than what its memory is planned with, and
    a state that is held for two reasons is counted once."""
    for make in HYBRIDS.values():
        model = backbone(make())
        inputs = timed_frames_input(0, after=44) if make is qwen35 else text_input(0, 50)
        session = Session(model, [Sampling()])
        session.prefill(model.prompts(inputs))
        request = session.requests[0]
        assert request.cache.states is not None
        one = model.state_bytes // recurrent.STATES_PER_REQUEST
        assert request.cache.states.bytes <= model.state_bytes
        assert request.cache.states.bytes % one == 0
        assert request.cache.states.bytes >= 2 * one, "the empty states are stored too"
        rows = request.cache.bytes - request.cache.states.bytes
        assert rows == model.token_bytes * request.cache.capacity
        session.score({0: chain([1, 2, 3])})
        session.commit({0: [1, 2]})
        assert request.cache.states.bytes <= model.state_bytes
