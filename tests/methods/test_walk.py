"""The walk through a model: stages found by running it, and evidence equal to that of running the whole model every time."""

import copy

import pytest
import torch
import zoo

from secateur.methods import Solution, solve_all
from secateur.moments import layer_inputs
from secateur.targeting import targets

ALL = frozenset({"gram", "cross", "residual"})


def answer(target):
    """Half of the weights, by size, and twice as large: the layers after it see a difference."""
    W = target.layout.matrix(target.weight)
    mask = W.abs() > W.abs().median()
    return Solution(mask, (1.5 * W).masked_fill(~mask, 0))


def walked(model, batches, needs=ALL, **chosen):
    """The evidence of each layer in the order in which they are solved, and the notes."""
    seen, notes = {}, {}
    found, _ = targets(model, **chosen)

    def solve(target, evidence):
        seen[target.name] = dict(evidence)
        return answer(target)

    solutions = solve_all(model, found, needs, batches, solve, notes)
    return seen, notes, solutions


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


@torch.no_grad()
def slow(model, batches, path, stages, streams):
    """The evidence of the layers in the blocks: for each stage the whole model runs twice, dense and as pruned so far."""
    dense, pruned = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    solved = {t.name: answer(t) for t in targets(model)[0]}
    layouts = {t.name: t.layout for t in targets(model)[0]}
    found = {}
    for number in range(len(model.get_submodule(path))):
        for stage in stages:
            runs = []
            for one in (dense, pruned):
                runs.append(inputs_of(one, batches, f"{path}.{number}", stage, streams, layouts))
            for layer in stage:
                name = f"{path}.{number}.{layer}"
                (x, r), (y, s) = runs[0][layer], runs[1][layer]
                found[f"{name}.weight"] = {"gram": y.mT @ y, "cross": x.mT @ y, "tokens": y.shape[1]}
                if layer in streams:
                    found[f"{name}.weight"]["residual"] = (r - s).mT @ y
            for layer in stage:
                name = f"{path}.{number}.{layer}.weight"
                pruned.get_parameter(name).copy_(layouts[name].restore(solved[name].weight))
    return found


def inputs_of(model, batches, block, stage, streams, layouts):
    """For each layer of a stage its inputs on all batches, and the stream that its output is added to, in float64."""
    seen = {layer: ([], []) for layer in stage}
    current, handles = {}, []

    def keep(key):
        def hook(_, args, kwargs):
            current[key] = next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v)).clone()

        return hook

    def read(layer, module):
        def hook(_, args):
            name = f"{block}.{layer}.weight"
            seen[layer][0].append(layer_inputs(module, "weight", layouts[name], args, {}))

        return hook

    for path in set(streams.values()):
        module = model.get_submodule(f"{block}.{path}" if path else block)
        handles.append(module.register_forward_pre_hook(keep(path), with_kwargs=True, prepend=True))
    for layer in stage:
        module = model.get_submodule(f"{block}.{layer}")
        handles.append(module.register_forward_pre_hook(read(layer, module)))
    for batch in batches:
        call(model, batch)
        for layer in stage:
            if layer in streams:
                r = current[streams[layer]]
                axis = 1 if r.ndim == 4 else -1
                seen[layer][1].append(r.movedim(axis, -1).flatten(0, -2)[None])
    for handle in handles:
        handle.remove()
    return {layer: (torch.cat(x, 1).double(), torch.cat(r, 1).double() if r else None) for layer, (x, r) in seen.items()}


def close(found, wanted, what, rtol):
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-5, msg=lambda text: f"{what}: {text}")


def flat(evidence):
    return evidence if evidence.ndim == 3 else evidence[None]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_stages_and_their_evidence_are_those_of_running_the_whole_model_for_every_stage(name):
    build, batches, path, stages, streams = zoo.MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    seen, notes, _ = walked(model, batches, include=f"{path}.*")
    assert not notes
    depth = len(model.get_submodule(path))
    expected = [f"{path}.{i}.{layer}.weight" for i in range(depth) for stage in stages for layer in stage]
    assert list(seen) == expected
    wanted = slow(model, batches, path, stages, streams)
    for layer, evidence in wanted.items():
        assert set(seen[layer]) == set(evidence), layer
        assert seen[layer]["tokens"] == evidence["tokens"]
        for kind in set(evidence) - {"tokens"}:
            close(flat(seen[layer][kind]), evidence[kind], f"{kind} of {layer}", rtol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layers_that_read_the_same_tensor_share_one_gram_matrix():
    seen, _, _ = walked(zoo.llama(), zoo.TEXT)
    entry = {name.removeprefix("model.layers.1.").removesuffix(".weight"): seen[name] for name in seen if ".1." in name}
    for kind in ("gram", "cross"):
        for group in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["o_proj"], ["down_proj"]):
            matrices = [found[kind] for name, found in entry.items() if name.rpartition(".")[2] in group]
            assert all(matrix is matrices[0] for matrix in matrices)
    assert entry["self_attn.q_proj"]["gram"] is not entry["mlp.up_proj"]["gram"]


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators of one kind."""

    def __init__(self, word):
        super().__init__()
        self.word, self.calls = word, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += self.word in str(func)
        return func(*args, **(kwargs or {}))


def test_attention_runs_once_for_each_block_and_batch_beside_one_recorded_run():
    model, batches = zoo.llama(num_hidden_layers=4).eval(), zoo.TEXT[:1] * 5
    with Counting("scaled_dot_product") as attention:
        walked(model, batches, frozenset({"gram"}), include="model.layers.*")
    linking, recorded = len(batches), 4  # the first block on every batch; one batch in every block
    assert attention.calls == linking + recorded + 4 * len(batches)


@pytest.mark.parametrize("left", [False, True], ids=["padded on the right", "padded on the left"])
@pytest.mark.parametrize("build", [zoo.llama, zoo.gpt2, zoo.opt], ids=["llama", "gpt2", "opt"])
def test_padded_positions_are_in_no_matrix(build, left):
    """A batch of padded sequences gives what the sequences give one by one."""
    torch.manual_seed(0)
    model = build().eval()
    rows = [torch.randint(2, zoo.VOCABULARY, (n,)) for n in (5, 9, 7)]
    alone = [{"input_ids": row[None]} for row in rows]
    width = max(map(len, rows))
    sides = [((width - len(row), 0) if left else (0, width - len(row))) for row in rows]
    ids = torch.stack([torch.nn.functional.pad(row, side, value=3) for row, side in zip(rows, sides)])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), side) for row, side in zip(rows, sides)])
    padded = {"input_ids": ids, "attention_mask": mask}
    if left and build is not zoo.opt:  # it counts positions by the mask by itself
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    one, _, _ = walked(model, alone)
    other, notes, _ = walked(model, [padded])
    assert not notes
    for name, evidence in one.items():
        assert other[name]["tokens"] == evidence["tokens"] == 21
        for kind in set(evidence) - {"tokens"}:
            close(other[name][kind], evidence[kind], f"{kind} of {name}", rtol=1e-4)


def test_empty_batches_are_skipped_with_a_note_and_nan_is_refused_with_the_number_of_the_batch():
    model = zoo.ResNet().eval()
    good = zoo.PLAIN_IMAGES
    one, notes, _ = walked(model, good)
    assert not notes
    other, notes, _ = walked(model, [good[0], torch.zeros(0, 3, 6, 6), good[1]])
    assert notes == {"data": "skipped empty batches of data=: 2 (counted from 1)"}
    assert all(torch.equal(one[name]["gram"], other[name]["gram"]) for name in one)
    bad = good[1].clone()
    bad[1, 2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match="batch 3 of data="):
        walked(model, [*good, bad])
    with pytest.raises(ValueError, match="all 1 batches of data= are empty"):
        walked(model, [torch.zeros(0, 3, 6, 6)])
    huge = 1e30 * torch.ones(1, 3, 6, 6)
    with pytest.raises(ValueError, match=r"the inputs of '.*' are NaN or infinite, or so large"):
        walked(model, [huge])


def test_batches_may_be_tensors_tuples_and_mappings_of_any_length():
    model = zoo.llama().eval()
    wanted, _, _ = walked(model, zoo.TEXT)
    for kind in ([*zoo.IDS], [(ids,) for ids in zoo.IDS], [(ids, None) for ids in zoo.IDS], zoo.TEXT[:1] + zoo.IDS[1:]):
        found, _, _ = walked(model, kind)
        for name in wanted:
            torch.testing.assert_close(found[name]["gram"], wanted[name]["gram"], rtol=1e-6, atol=1e-6)
