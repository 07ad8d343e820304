"""The walk through a model: stages found by running it, and evidence equal to that of running the whole model every time."""

import copy

import pytest
import torch
import zoo
from torch import nn

import secateur as sc
from secateur.methods import Solution, solve_all
from secateur.methods.calls import first_samples
from secateur.methods.stages import find_stages
from secateur.methods.walk import _Block
from secateur.moments import Moments, layer_inputs
from secateur.stream import Chain
from secateur.tape import record
from secateur.targeting import targets

ALL = frozenset({"gram", "cross", "residual"})


@pytest.mark.parametrize("build", [zoo.llama, zoo.gpt2, zoo.gptj])
def test_between_stages_the_output_of_a_norm_is_not_kept(build):
    model = build().eval()
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    chain = Chain.of(model, blocks, [{"input_ids": zoo.IDS[0]}])
    (call,) = chain.feed().calls(0)
    found, _ = targets(blocks[0])
    tape = record(blocks[0], call, found)
    stages, (windows,) = find_stages(found, [tape])
    stream = call[0][0].nbytes if call[0] else call[1]["hidden_states"].nbytes
    for stage, window in zip(stages, windows, strict=True):
        first = min(read.at for read in tape.reads if read.name in stage.names)
        between = [str(function) for function in tape.functions[window.start : first]]
        assert window.start <= first
        assert not any("mm" in name or "attention" in name for name in between)
        read_after_norms = any(word in " ".join(stage.names) for word in ("q_proj", "c_attn", "gate_proj"))
        assert tape._needed(window.start) <= tape._needed(first)
        if read_after_norms:
            assert window.start < first
            assert tape._needed(window.start) < 2 * stream <= tape._needed(first)


def answer(target):
    """Half of the weights, by size, and twice as large: the layers after it see a difference."""
    W = target.layout.matrix(target.weight)
    mask = W.abs() > W.abs().median()
    return Solution(mask, (1.5 * W).masked_fill(~mask, 0))


def walked(model, batches, needs=ALL, blend=None, **chosen):
    """The evidence of each layer in the order in which they are solved, and the notes."""
    seen, notes = {}, {}
    found, _ = targets(model, **chosen)

    def solve(target, evidence):
        seen[target.name] = dict(evidence)
        return answer(target)

    solutions = solve_all(model, found, needs, batches, solve, notes, blend=blend)
    return seen, notes, solutions


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch.clone())


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
                found[f"{name}.weight"] = {"gram": y.mT @ y, "cross": (x - y).mT @ y, "tokens": y.shape[1]}
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
            seen[layer][0].append(layer_inputs(module, "weight", layouts[name], args, {}).clone())

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
        assert set(seen[layer]) == set(evidence) | {"stage"}, layer
        assert layer.split(path)[1].split(".", 2)[2].removesuffix(".weight") in stages[seen[layer]["stage"]]
        assert seen[layer]["tokens"] == evidence["tokens"]
        for kind in set(evidence) - {"tokens", "stage"}:
            close(flat(seen[layer][kind]), evidence[kind], f"{kind} of {layer}", rtol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_blend_gives_the_sum_of_cross_and_residual_for_layers_with_inputs_of_their_own(name):
    build, batches, path, _, _ = zoo.MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    found = {target.name: target for target in targets(model, include=f"{path}.*")[0]}
    apart, _, _ = walked(model, batches, include=f"{path}.*")
    blended, _, _ = walked(model, batches, blend=(0.3, 0.7), include=f"{path}.*")
    grams = [id(evidence["gram"]) for evidence in apart.values()]
    for layer, evidence in blended.items():
        layout, old = found[layer].layout, apart[layer]
        if layout.rows > layout.cols or layout.groups > 1 or grams.count(id(old["gram"])) > 1 or "experts" in layer:
            assert set(evidence) == set(old), layer
            continue
        assert set(evidence) == set(old) - {"cross", "residual"} | {"shift"}, layer
        W = layout.matrix(found[layer].weight).double()
        wanted = 0.3 * W @ old["cross"] + 0.7 * old.get("residual", torch.zeros(1).double())
        close(evidence["shift"], wanted, layer, rtol=1e-4)
    assert all(torch.equal(blended[layer]["gram"], evidence["gram"]) for layer, evidence in apart.items())


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
    linking = 1 + 4  # the first block on the first batch; then all, to see whether they read in the cache what others left
    recorded = 4  # one batch in every block
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
        for kind in set(evidence) - {"tokens", "stage"}:
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


# --- other models -----------------------------------------------------------------------------------------------------


def stages_in(model, batches, **chosen):
    seen, notes, _ = walked(model, batches, **chosen)
    found = {}
    for name, evidence in seen.items():
        found.setdefault(evidence["stage"], []).append(name.removesuffix(".weight"))
    return list(found.values()), seen, notes


def test_a_vision_transformer_and_the_layers_outside_of_its_blocks():
    found, seen, notes = stages_in(zoo.vit().eval(), zoo.IMAGES)
    assert not notes
    layer = [name for name in found[0] if ".0." in name]
    assert len(layer) == 3  # queries, keys and values
    assert {"vit.embeddings.patch_embeddings.projection", "classifier"} <= {name for names in found for name in names}
    assert list(seen)[-1] == "classifier.weight"
    assert sum("residual" in evidence for evidence in seen.values()) == 4  # two layers in each of two blocks


@pytest.mark.parametrize("name", ["encoder and decoder", "stem and two rows of blocks"])
def test_layers_outside_of_the_longest_row_of_blocks_are_solved_in_the_order_in_which_they_run(name):
    torch.manual_seed(0)
    model, batches = (zoo.t5(), zoo.PAIRS) if name == "encoder and decoder" else (zoo.TwoRows(), zoo.PLAIN_IMAGES)
    seen, notes, solutions = walked(model.eval(), batches)
    assert not notes
    pruned = copy.deepcopy(model)
    for target in targets(pruned)[0]:
        target.tensor.data.copy_(solutions[target.name].weight)
    moments = Moments(targets(pruned)[0], frozenset({"gram"}))
    with torch.no_grad(), moments.listen():
        for batch in batches:
            call(pruned, batch)
    for layer, wanted in moments.table().items():
        close(seen[layer]["gram"], wanted["gram"], layer, rtol=1e-4)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_of_torch_passes_its_weights_to_functions(norm_first):
    model = zoo.Encoder(norm_first).eval()
    found, seen, notes = stages_in(model, zoo.VECTORS)
    assert not notes
    assert found == [
        [f"encoder.layers.{i}.{name}" for i in range(2) for name in names]
        for names in (["self_attn.in_proj_weight"], ["self_attn.out_proj"], ["linear1"], ["linear2"])
    ]
    streams = {name for name, evidence in seen.items() if "residual" in evidence}
    assert streams == {f"encoder.layers.{i}.linear2.weight" for i in range(2)}


def test_a_model_without_blocks_is_solved_layer_by_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            x = self.a(x).relu_()
            return self.d(self.b(x).tanh() * self.c(x))

    model, x = Net().eval(), torch.randn(9, 6)
    found, seen, notes = stages_in(model, [x])
    assert found == [["a"], ["b", "c"], ["d"]]
    assert not notes
    with torch.no_grad():
        pruned = copy.deepcopy(model)
        for name in ("a", "b", "c"):
            getattr(pruned, name).weight.copy_(answer(targets(getattr(model, name))[0][0]).weight)
        y = pruned.a(x).relu()
        y = (pruned.b(y).tanh() * pruned.c(y)).double()
    torch.testing.assert_close(seen["d.weight"]["gram"], y.T @ y, rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """Two blocks around a function `inner(block, x)`."""

    class Block(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.a, self.b, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), inner

        def forward(self, x):
            return self.inner(self, x)

    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleList(Odd.Block(inner) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_place(m, x):
    """Writes to its argument, and to a tensor that is needed after a layer was called."""
    x += 1
    kept = x * 2
    y = m.a(kept)
    kept.mul_(3)
    return m.b(y.relu_()) + kept + x


def shared(m, x):
    return m.a(m.b(m.a(x)))


def as_numbers(m, x):
    """Decides by values that are read without an operator."""
    y = m.a(x)
    signs = (y.sum(-1) > 0).long().tolist()
    return m.b(y) if sum(signs) % 2 else m.b(y.sigmoid() * y)


def by_value(m, x):
    y = m.a(x)
    return m.b(y) if y.sum() > 0 else m.b(y.sigmoid()) - y


def turned(m, x):
    """Transposes a tensor in place before a layer is called, and reads it afterwards. `nn.GRU` does so with its output."""
    y = m.a(x).sigmoid()
    y.t_()
    return m.b(y.T) + y.T


@pytest.mark.parametrize("inner", [in_place, as_numbers, by_value, turned])
@torch.no_grad()
def test_blocks_that_write_in_place_or_decide_by_values_give_the_same_evidence(inner):
    torch.manual_seed(1)
    model = Odd(inner).eval()
    batches = [torch.randn(n, 6) for n in (3, 4, 5, 6, 7)]
    kept = [batch.clone() for batch in batches]
    seen, notes, _ = walked(model, batches)
    assert not notes
    assert all(torch.equal(one, other) for one, other in zip(batches, kept))
    wanted = slow(model, kept, "blocks", [["a"], ["b"]], {})
    for name, evidence in wanted.items():
        for kind in ("gram", "cross"):
            close(seen[name][kind], evidence[kind][0], f"{kind} of {name}", rtol=1e-5)


@torch.no_grad()
def test_layers_that_depend_on_each_other_are_one_stage_and_the_notes_say_so():
    model = Odd(shared).eval()
    found, seen, notes = stages_in(model, [torch.randn(4, 6)])
    assert found == [["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"]]
    assert set(notes) == {"blocks.0", "blocks.1"}
    assert "solved as one stage" in notes["blocks.0"]
    assert seen["blocks.0.a.weight"]["tokens"] == 8


# --- experts ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def expert_inputs(experts, hidden, chosen):
    """What every expert reads, by the definition of the model: {expert: (positions, inputs, inner activations)}."""
    found = {}
    for e in range(experts.num_experts):
        rows = (chosen == e).any(-1).nonzero()[:, 0]
        gate, up = (hidden[rows] @ experts.gate_up_proj[e].T).chunk(2, -1)
        found[e] = rows, hidden[rows].double(), (experts.act_fn(gate) * up).double()
    return found


@torch.no_grad()
def routed(model, block, batches):
    """The inputs of the experts of one block, batch by batch, while the whole model runs."""
    model.config._experts_implementation = "eager"
    found, experts = [], model.model.layers[block].mlp.experts
    hook = experts.register_forward_pre_hook(lambda m, args: found.append(expert_inputs(m, args[0], args[1])))
    for batch in batches:
        model(**batch)
    hook.remove()
    return found


def shrunk(sums, counts, width):
    mean = sum(sums) / sum(counts)
    return torch.stack([one + width * mean for one in sums])


@pytest.mark.parametrize("padded", [False, True])
def test_experts_have_matrices_of_their_own_shrunk_towards_the_mean(padded):
    torch.manual_seed(0)
    model = zoo.mixtral().eval()
    batches = [dict(batch) for batch in zoo.TEXT]
    valid = [torch.ones(batch["input_ids"].shape, dtype=torch.bool) for batch in batches]
    if padded:
        valid[0][1, 5:] = valid[1][0, 4:] = False
        batches = [batch | {"attention_mask": mask.long()} for batch, mask in zip(batches, valid)]
    seen, notes, solutions = walked(model, batches)
    assert not notes
    names = [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    dense, pruned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, solution in solutions.items():
            if name not in names:
                pruned.get_parameter(name).copy_(solution.weight)
    for number, (name, width) in enumerate(zip(names, (16, 20))):
        if number:
            pruned.get_parameter(names[0]).data.copy_(solutions[names[0]].weight)
        sums = {kind: [torch.zeros(width, width).double() for _ in range(4)] for kind in ("gram", "cross")}
        counts = [0] * 4
        for mask, one, other in zip(valid, routed(dense, 1, batches), routed(pruned, 1, batches)):
            for e in range(4):
                there = dict(zip(one[e][0].tolist(), one[e][1 + number]))
                for row, y in zip(other[e][0].tolist(), other[e][1 + number]):
                    if mask.flatten()[row]:
                        counts[e] += 1
                        sums["gram"][e] += torch.outer(y, y)
                        sums["cross"][e] += torch.outer(there.get(row, y) - y, y)
        for kind, own in sums.items():
            close(seen[name][kind], shrunk(own, counts, width), f"{kind} of {name}", rtol=1e-5)
        assert seen[name]["tokens"] == sum(counts)
        assert seen[name]["stage"] == 2 + number


def test_an_expert_without_tokens_is_named_and_gets_the_mean_of_the_others():
    torch.manual_seed(0)
    model = zoo.mixtral().eval()
    with torch.no_grad():  # the router's logit of expert 2 is far below the others for every token
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.fill_(1)
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[[0, 1, 3], [0, 1, 2]] = 5.0
        model.model.embed_tokens.weight.abs_()
        for layer in model.model.layers:
            layer.mlp.gate.weight[2] = -100.0
    seen, notes, _ = walked(model, zoo.TEXT)
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            assert notes[path] == "experts 2 saw no token; solved with the inputs of the other experts"
            gram = seen[path]["gram"]
            width, tokens = gram.shape[-1], seen[path]["tokens"]
            mean = (gram.sum(0) - gram[2] * 4) / tokens  # each has width times the mean added, this one nothing else
            torch.testing.assert_close(gram[2], width * mean, rtol=1e-6, atol=1e-8)
    plan = sc.prune_(model, pattern="2:4", method="sparsegpt", data=zoo.TEXT, include="model.layers.*")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal((weight.view(-1, 4) != 0).sum(1), torch.full((weight.numel() // 4,), 2))
    assert plan.metrics()["sparsity"] == 0.5


def test_lists_of_experts_are_pooled_and_share_inputs_inside_an_expert():
    torch.manual_seed(0)
    model = zoo.Mixtures().eval()
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        model.blocks[0].inner.bias[2] = -100.0  # the third expert of the first block gets nothing
    few, many = x[:1, :1], x
    seen, notes, _ = walked(model, [few, many])  # the recorded batch has one position: one expert runs
    experts = [f"blocks.0.experts.{i}" for i in range(3)]
    assert {name for name in notes if "blocks.0" in name} == {f"{experts[2]}.gate.weight", f"{experts[2]}.down.weight"}
    assert notes[f"{experts[2]}.gate.weight"] == "this expert saw no token; solved with the inputs of the other experts"
    for name in experts:
        assert seen[f"{name}.gate.weight"]["gram"] is seen[f"{name}.up.weight"]["gram"]
        assert [seen[f"{name}.{layer}.weight"]["stage"] for layer in ("gate", "up", "down")] == [1, 1, 2]
    with torch.no_grad():
        inner = copy.deepcopy(model.blocks[0].inner)
        inner.weight.copy_(answer(targets(inner)[0][0]).weight)
        flat = torch.cat([inner(batch).flatten(0, 1) for batch in (few, many)])
    chosen = flat[:, :3].argmax(-1)
    sums = [flat[chosen == e].double().T @ flat[chosen == e].double() for e in range(3)]
    wanted = shrunk(sums, [int((chosen == e).sum()) for e in range(3)], 8)
    for e, name in enumerate(experts):
        torch.testing.assert_close(seen[f"{name}.gate.weight"]["gram"], wanted[e], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kept", [(), ("layers.0.",), ("layers.0.", "layers.1.")])
def test_the_dense_model_runs_only_after_a_layer_has_changed(monkeypatch, kept):
    model, ran, reads = zoo.llama().eval(), [], _Block._reads

    def counted(self, parts, *rest):
        ran.extend([self.name] if parts is self.dense else [])
        return reads(self, parts, *rest)

    def solve(target, evidence):
        if not any(part in target.name for part in kept):
            return answer(target)
        assert not evidence["cross"].any()
        assert not evidence.get("residual", torch.zeros(1)).any()
        return Solution(torch.ones(target.layout.rows, target.layout.cols, dtype=torch.bool))

    monkeypatch.setattr(_Block, "_reads", counted)
    found = targets(model, include=["model.layers.0.*", "model.layers.1.*"])[0]
    solve_all(model, found, ALL, zoo.TEXT, solve)
    assert set(ran) == {f"model.layers.{number}" for number in range(len(kept), 2)}


@torch.no_grad()
def test_rounding_of_the_dense_run_does_not_reach_models_that_are_pruned_a_little(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)]
    model, data = nn.Sequential(*layers), [torch.randn(256, 64) for _ in range(4)]
    errors = []
    for able in (False, True):
        monkeypatch.setattr("secateur.products.has_bfloat16", lambda kind, able=able: able)
        pruned = copy.deepcopy(model)
        sc.prune_(pruned, method="flow", sparsity=0.01, data=data)
        errors.append(float((pruned(data[0]) - model(data[0])).norm()))
    assert errors[1] <= 1.05 * errors[0]


def test_the_dense_run_of_the_first_block_is_rounded_once_its_inputs_are_far_from_those_of_the_pruned_one(monkeypatch):
    model, rounded, reads = zoo.llama().eval(), [], _Block._reads

    def seen(self, parts, *rest):
        rounded.extend([(self.name, parts.rough)] if parts is self.dense else [])
        return reads(self, parts, *rest)

    monkeypatch.setattr(_Block, "_reads", seen)
    sc.prune_(model, method="flow", sparsity=0.8, include="model.layers.*", data=zoo.TEXT)
    first = [rough for name, rough in rounded if name == "model.layers.0"]
    assert first == sorted(first)
    assert not first[0]
    assert first[-1]


class Scaled(nn.Linear):
    def forward(self, x, scale, rows=None):
        return super().forward(x if rows is None else x.view(rows, 8)) * scale.sum()


def test_channels_are_tried_on_two_samples_and_on_the_whole_call_where_a_block_refuses_those():
    x, scale = torch.randn(6, 8), torch.ones(3, 1)
    args, kwargs = first_samples(Scaled(8, 8), ((x,), {"scale": scale}))
    assert torch.equal(args[0], x[:2])
    assert kwargs["scale"] is scale
    args, _ = first_samples(Scaled(8, 8), ((x,), {"scale": scale, "rows": 6}))
    assert args[0] is x


class Held:
    """A hidden state in an object that is no tree of tensors."""

    def __init__(self, x):
        self.x = x


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, held):
        return Held(held.x + self.down(torch.relu(self.up(held.x))))


class Held3(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Holding() for _ in range(3))

    def forward(self, x):
        held = Held(x)
        for block in self.blocks:
            held = block(held)
        return held.x


@torch.no_grad()
def test_blocks_that_get_their_input_in_an_object_are_compared_with_the_dense_model():
    torch.manual_seed(0)
    model, batches = Held3().eval(), [torch.randn(20, 8) for _ in range(3)]
    seen, _, _ = walked(model, batches)
    wanted = slow(model, batches, "blocks", [["up"], ["down"]], {})
    for name, evidence in wanted.items():
        close(seen[name]["cross"], evidence["cross"][0], name, rtol=1e-4)
    assert bool(seen["blocks.1.up.weight"]["cross"].any())


class Leaving(nn.Module):
    """Reads what the first block left in an object that all blocks get, as the keys of an earlier block are read in a cache."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, held):
        y = torch.relu(self.up(x))
        if held.x is None:
            held.x = y
        return x + self.down(y + held.x)


class Left3(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(3))

    def forward(self, x):
        held = Held(None)
        for block in self.blocks:
            x = block(x, held)
        return x


@torch.no_grad()
def test_what_a_block_leaves_in_an_object_reaches_the_blocks_that_read_it():
    torch.manual_seed(0)
    model, batches = Left3().eval(), [torch.randn(20, 8) for _ in range(3)]
    seen, _, _ = walked(model, batches)
    wanted = slow(model, batches, "blocks", [["up"], ["down"]], {"down": ""})
    for name, evidence in wanted.items():
        for kind in ("gram", "cross", "residual"):
            if kind in evidence:
                close(seen[name][kind], evidence[kind][0], f"{kind} of {name}", rtol=1e-4)


class Writing(nn.Module):
    """Writes to a tensor that all blocks get, and reads a part of it: what the block before wrote, or its own part."""

    def __init__(self, number, back):
        super().__init__()
        self.number, self.read = number, max(number - back, 0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, held):
        room = held.x if isinstance(held, Held) else held
        y = torch.relu(self.up(x))
        room[..., self.number] = y
        return x + self.down(y + room[..., self.read])


class Written3(nn.Module):
    def __init__(self, back, plain):
        super().__init__()
        self.plain, self.blocks = plain, nn.ModuleList(Writing(number, back) for number in range(3))

    def forward(self, x):
        room = x.new_zeros(*x.shape, 3)
        held = room if self.plain else Held(room)
        for block in self.blocks:
            x = block(x, held)
        return x


@torch.no_grad()
@pytest.mark.parametrize("plain", [False, True], ids=["in an object", "tensor"])
@pytest.mark.parametrize("back", [0, 1], ids=["its own", "of another block"])
def test_what_a_block_writes_to_a_tensor_reaches_the_blocks_that_read_it(back, plain):
    torch.manual_seed(0)
    model, batches = Written3(back, plain).eval(), [torch.randn(20, 8) for _ in range(3)]
    assert isinstance(Chain.of(model, list(model.blocks), batches), str) == bool(back)
    seen, _, _ = walked(model, batches)
    wanted = slow(model, batches, "blocks", [["up"], ["down"]], {"down": ""})
    for name, evidence in wanted.items():
        for kind in ("gram", "cross", "residual"):
            if kind in evidence:
                close(seen[name][kind], evidence[kind][0], f"{kind} of {name}", rtol=1e-4)


@torch.no_grad()
def test_decoder_blocks_that_share_keys_and_values_are_pruned_as_any_others():
    torch.manual_seed(0)
    model = zoo.gemma3n().eval()
    plan = sc.prune_(model, method="flow", pattern="2:4", data=zoo.TEXT, include="model.layers.*_proj*")
    assert plan.metrics()["sparsity"] == 0.5
    assert all(weight.isfinite().all() for weight in model.parameters())


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@torch.no_grad()
@pytest.mark.parametrize("layer", ["up", "down"])
@pytest.mark.parametrize("whole", [False, True], ids=["weight", "module"])
def test_a_weight_that_blocks_share_is_dense_in_the_dense_run_of_all_of_them(layer, whole):
    torch.manual_seed(0)
    model, batches = nn.Sequential(*(Adding() for _ in range(3))).eval(), [torch.randn(20, 8) for _ in range(3)]
    if whole:
        setattr(model[1], layer, getattr(model[0], layer))
    else:
        getattr(model[1], layer).weight = getattr(model[0], layer).weight
    seen, _, solutions = walked(model, batches)
    dense, pruned = copy.deepcopy(model), copy.deepcopy(model)
    for name, evidence in seen.items():
        x, y = (inputs_in_block(one, torch.cat(batches), *name.split(".")[:2]).double() for one in (dense, pruned))
        close(evidence["gram"], y.T @ y, f"gram of {name}", rtol=1e-4)
        close(evidence["cross"], (x - y).T @ y, f"cross of {name}", rtol=1e-4)
        pruned.get_parameter(name).copy_(solutions[name].weight)
    assert len(seen) == 5


def inputs_in_block(model, x, number, layer):
    x = model[: int(number)](x)
    return x if layer == "up" else torch.relu(model[int(number)].up(x))


class Reusing(nn.Module):
    """A block that may return the same memory at every call."""

    def __init__(self, reuses):
        super().__init__()
        self.up, self.down, self.reuses = nn.Linear(8, 8), nn.Linear(8, 8), reuses
        self.register_buffer("room", torch.zeros(4, 8), persistent=False)

    def forward(self, x):
        y = x + self.down(self.up(x).relu())
        return self.room.copy_(y) if self.reuses else y


def test_blocks_that_return_their_own_memory_feed_the_next_what_they_returned_for_each_batch():
    batches, found = [torch.randn(4, 8) for _ in range(3)], []
    for reuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Reusing(reuses) for _ in range(3))).eval()
        sc.prune_(model, sparsity=0.5, method=sc.methods.admm(), data=batches)
        found.append(model.state_dict())
    for name, weight in found[0].items():
        if "room" not in name:
            torch.testing.assert_close(found[1][name], weight, rtol=0, atol=0, msg=name)


def test_what_the_dense_model_read_is_not_overwritten_by_the_pruned_one():
    batches, found = [torch.randn(4, 8) for _ in range(3)], []
    for reuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(Reusing(reuses) for _ in range(3))), nn.Linear(8, 8)).eval()
        sc.prune_(model, sparsity=0.5, method="flow", data=batches)
        found.append(model[1].weight)
    torch.testing.assert_close(*found, rtol=0, atol=0)


class TwoTowers(nn.Module):
    """Two rows of blocks. The longer one runs only with images, as in models that read text and images."""

    def __init__(self, deep=3):
        super().__init__()
        self.vision, self.text = zoo.Mixtures(), zoo.Mixtures()
        self.vision.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(deep))
        self.joint, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, image=None):
        x = x if image is None else x + self.joint(self.vision(image))
        return self.text(x)


@pytest.mark.parametrize("deep", [2, 30])
@pytest.mark.parametrize("how", [{"method": "flow", "pattern": "2:4"}, {"method": "loss", "sparsity": 0.5}])
def test_all_layers_that_no_batch_reaches_are_named_at_once(deep, how):
    torch.manual_seed(0)
    model, data = TwoTowers(deep), [{"x": torch.randn(2, 5, 8)} for _ in range(2)]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^'vision\.\*', 'joint\.weight', 'spare\.weight' saw no input .* exclude them"):
        sc.prune_(model, data=data, **how)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    plan = sc.prune_(model, data=data, exclude=["vision.*", "joint.weight", "spare.weight"], **how)
    assert plan.metrics()["sparsity"] == 0.5


class Repeating(nn.Module):
    """Its blocks run several times, as in models that reason by repeating their layers."""

    def __init__(self, times=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2))
        self.times = times

    def forward(self, x, attention_mask=None):
        for _ in range(self.times):
            for block in self.blocks:
                x = x + block(x)
        return x


def test_blocks_that_repeat_are_solved_with_the_inputs_of_all_their_runs():
    torch.manual_seed(0)
    model, padded = Repeating().eval(), torch.ones(2, 7, dtype=torch.long)
    padded[1, 4:] = 0
    batches = [{"x": torch.randn(2, 7, 8), "attention_mask": padded}, {"x": torch.randn(3, 5, 8)}]
    inputs = []
    handle = model.blocks[0][0].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().double()))
    for batch in batches:
        call(model, batch)
    handle.remove()
    kept = torch.cat([*(x[padded.bool()] for x in inputs[:3]), *(x.flatten(0, 1) for x in inputs[3:])])
    seen, notes, _ = walked(model, batches)
    assert seen["blocks.0.0.weight"]["tokens"] == len(kept) == 3 * (11 + 15)
    close(seen["blocks.0.0.weight"]["gram"], kept.mT @ kept, "gram", rtol=1e-5)
    why = "runs more than once for a batch; solved with the inputs that its own dense weights produce"
    assert notes == {"blocks.0": why, "blocks.1": why}
    sc.prune_(model, method="flow", pattern="2:4", data=batches)
