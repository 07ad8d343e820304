"""A trace leaves the model unchanged, gives a reason for every frozen axis, and raises errors that users can act on."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cutting import check, choose, cut_, difference, group_of, run, seeded, sizes, unchanged, zero_
from test_probes import Attention, Lam, conv, image, tokens
from torch import nn

from secateur.axes import Attr
from secateur.trace import main_outputs, plan_counts, solve_attributes, trace
from secateur.trace.provenance import Journal, Tagged
from secateur.trace.run import _run

MODELS = {
    "attention": (lambda: Attention(kv=2, rotary=True), tokens()),
    "convolutions": (
        lambda: nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8, groups=2), conv(8, 5)),
        image(),
    ),
    "lstm": (lambda: Lam(lambda s, x: s.o(s.r(x)[0]), r=nn.LSTM(12, 8, 2, batch_first=True), o=nn.Linear(8, 5)), tokens()),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 8, batch_first=True), 2), tokens()),
}


def picture(t):
    return sorted((g.size, g.frozen or "", sorted(g.flags), sorted(g.members)) for g in t.groups)


@pytest.mark.parametrize("name", MODELS)
def test_fake_and_real_tensors_give_the_same_groups(name):
    build, x = MODELS[name]
    model = build()
    real, fake = (_run(model, (x,), {}, main_outputs, fake, True) for fake in (False, True))
    assert (real.fake, fake.fake) == (False, True)
    assert picture(real) == picture(fake)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_left_as_it_was(name, fake):
    build, x = MODELS[name]
    model = build().train()
    before = torch.get_rng_state()
    with unchanged(model):
        _run(model, (x,), {}, main_outputs, fake, True)
    assert torch.equal(before, torch.get_rng_state())
    assert all(m.training for m in model.modules())
    assert not any(type(v) is Tagged for m in model.modules() for v in vars(m).values())


def test_model_is_left_as_it_was_when_the_inputs_do_not_run():
    model = MODELS["convolutions"][0]().train()
    with unchanged(model), pytest.raises(ValueError, match=r"Sequential does not run on the example inputs .*\(2, 4, 8, 8\)"):
        trace(model, torch.randn(2, 4, 8, 8))
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch._C._get_mkldnn_enabled()


def test_caches_that_a_run_leaves_in_the_model_are_taken_out_again():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.table, self.seen = nn.Linear(12, 8), nn.Linear(8, 5), {}, 0

        def forward(self, x):
            self.table["last"] = h = torch.relu(self.a(x))
            self.last, self.seen = h, self.seen + 1
            return self.b(h)

    model = Caching()
    with unchanged(model):
        trace(model, tokens())
    assert model.table == {}
    assert not hasattr(model, "last")


def test_forward_that_writes_to_a_weight_does_not_reach_the_real_one():
    class Rescaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.done = nn.Linear(12, 8), nn.Linear(8, 5), False

        def forward(self, x):
            if not self.done:
                self.a.weight.div_(2)
                self.done = True
            return self.b(torch.relu(self.a(x)))

    model = Rescaling()
    with unchanged(model):
        t = trace(model, tokens())
    assert t.fake
    assert sizes(t) == [8]


def test_models_on_the_meta_device_are_traced():
    with torch.device("meta"):
        model = Attention(kv=2)
    t = trace(model, torch.randn(2, 5, 12, device="meta"))
    assert t.fake
    assert sizes(t) == [2, 2, 6, 6]


def test_compiled_models_are_refused():
    model = nn.Sequential(nn.Linear(12, 8))
    with pytest.raises(ValueError, match=r"the model is compiled; trace the model before torch\.compile"):
        trace(torch.compile(model), tokens())
    model.compile()
    with pytest.raises(ValueError, match="is compiled"):
        trace(model, tokens())
    with pytest.raises(ValueError, match="module '0' is compiled"):
        trace(nn.Sequential(torch.compile(nn.Linear(12, 8))), tokens())


def test_non_modules_are_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        trace(lambda x: x, tokens())  # type: ignore[arg-type]


def test_inputs_by_name_and_outputs_by_choice():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 5)

        def forward(self, *, x):
            h = torch.relu(self.a(x))
            return {"hidden": h, "logits": self.b(h)}

    assert sizes(trace(Two(), {"x": tokens()})) == [8]  # the logits keep their shape; hidden states may shrink
    assert sizes(trace(Two(), (), {"x": tokens()}, outputs=lambda out: out)) == []


def test_outputs_that_no_weight_reads_keep_their_shape():
    class Boxes(nn.Module):
        def __init__(self, nested):
            super().__init__()
            self.nested, self.a, self.b, self.c = nested, nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(8, 4)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return {"first": self.b(h), "rest": [self.c(h)]} if self.nested else {"logits": self.b(h), "boxes": self.c(h)}

    for nested in (False, True):
        t = trace(Boxes(nested), tokens())
        assert sizes(t) == [8]
        assert t.skipped["c.weight[0]"] == "the model returns it"


def test_literal_size_freezes_the_axis_and_says_where():
    m = Lam(
        lambda s, x: s.o(torch.relu(s.a(x)).view(*x.shape[:-1], 4, 16).transpose(-1, -2).flatten(-2)),
        a=nn.Linear(12, 64),
        o=nn.Linear(64, 5),
    )
    t = trace(nn.Sequential(m), tokens())
    assert not t.prunable
    assert "fixed by the number 16 in 0 (view); make it an attribute of the module to prune it" in t.skipped["0.a.weight[0]"]


def test_positions_and_lookups_are_frozen_with_a_reason():
    m = Lam(lambda s, x: s.o(s.e(x) + torch.arange(s.w).double()), e=nn.Embedding(9, 12), o=nn.Linear(12, 5), w=12)
    t = trace(m.double(), torch.arange(4)[None])
    assert t.skipped["e.weight[0]"] == "units are addressed by value (rows of a lookup table)"
    assert "values depend on the position (arange)" in t.skipped["e.weight[1]"]


def test_tensors_outside_of_slots_are_owned_and_cut():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 5)
            self.plain, self.table, self.many = torch.randn(8), {"bias": torch.randn(8)}, [torch.randn(8)]

        def forward(self, x):
            return self.b(self.a(x) * self.plain + self.table["bias"] * self.many[0])

        def double(self):
            self.plain, self.table, self.many = (
                self.plain.double(),
                {"bias": self.table["bias"].double()},
                [self.many[0].double()],
            )
            return super().double()

    model = seeded(Cached())
    t = trace(model, tokens().double())
    assert {m.tensor for m in t.prunable[0].members} == {"a.weight", "a.bias", "b.weight", "plain", "table['bias']", "many[0]"}
    small = copy.deepcopy((model, t))
    keep = choose(small[1], small[1].prunable, 0)
    cut_(small[0], small[1], keep)
    assert small[0].table["bias"].shape == (4,)
    again = choose(t, t.prunable, 0)
    assert difference(run(small[0], (tokens().double(),)), run(zero_(model, t, again), (tokens().double(),))) < 1e-12


def test_branch_on_an_attribute_keeps_its_side():
    class Radix(nn.Module):
        def __init__(self):
            super().__init__()
            self.radix, self.a, self.b = 2, nn.Linear(12, 16), nn.Linear(8, 5)

        def forward(self, x):
            h = self.a(x).view(*x.shape[:-1], self.radix, -1)
            h = torch.softmax(h, -2) if self.radix > 1 else torch.sigmoid(h)
            return self.b(h.sum(-2))

    t = trace(Radix(), tokens())
    radix = next(g for g in t.prunable if g.size == 2)
    plan = plan_counts(t, {radix: 1})
    assert plan.counts == {radix: 2}
    assert "keeps 2 instead of 1" in plan.moved[radix]


def test_torchscript_that_reads_sizes_marks_them():
    @torch.jit.script
    def root(q: torch.Tensor):
        return torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float64))

    m = Lam(lambda s, x: s.o(torch.relu(s.a(x)) / root(s.a(x))), a=nn.Linear(12, 8), o=nn.Linear(8, 5))
    t = trace(m.double(), tokens().double())
    assert t.prunable[0].flags >= {"scale"}
    assert not t.prunable[0].exact
    assert t.formula_uses[0].how == "TorchScript function root"


def test_steps_record_the_run():
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    t = trace(model, tokens())
    names = [s.name for s in t.steps]
    assert names.count("aten::addmm") == 2
    relu = next(s for s in t.steps if s.name == "aten::relu")
    assert relu.module == "1"
    assert not relu.weights
    before = next(s for s in t.steps if relu.args[0].number in s.outs)
    (group,) = t.prunable
    assert group.atom in t.axes[relu.outs[0]]
    assert before.name in ("aten::view", "aten::_unsafe_view", "aten::addmm")  # which one depends on torch's version
    turned = next(s for s in t.steps if s.name == "aten::t")
    assert turned.weights
    assert t.names[turned.args[0].number] == "0.weight"


def test_attributes_change_with_the_counts_and_only_those():
    model = Attention(kv=2)
    t = trace(model, tokens())
    kv, dims = group_of(t, "v.weight", 0)
    keep = {kv.atom: 1, dims.atom: 3, group_of(t, "q.weight", 0)[-1].atom: 3}
    changes = {c.key[0]: (c.old, c.new) for c in solve_attributes(t, keep)}
    assert changes == {"kv": (2, 1), "heads": (4, 2), "dim": (6, 3)}


def test_attributes_that_cannot_fit_are_named():
    model = Attention()
    t = trace(model, tokens())
    _, value = group_of(t, "v.weight", 0)
    with pytest.raises(ValueError, match=r"Attention\.dim would have to be \[3, 6\] at once; plan the counts with plan_counts"):
        solve_attributes(t, {value.atom: 3})


def test_shared_config_gets_a_value_for_each_module():
    class Config:
        def __init__(self):
            self.inner = 8

    class Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.a, self.b = config, nn.Linear(12, 8), nn.Linear(8, 12)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)).view(*x.shape[:-1], self.config.inner))

    config = Config()
    model = nn.Sequential(Block(config), Block(config))
    t = trace(model, tokens())
    first, second = (g for g in t.prunable if g.size == 8)
    assert not t.constraints
    changes = solve_attributes(t, {first.atom: 4, second.atom: 6})
    assert [(c.owner is config, c.key, c.old, c.new, c.module) for c in changes] == [
        (True, ("inner", None), 8, 4, "0"),
        (True, ("inner", None), 8, 6, "1"),
    ]
    assert [(c.new, c.module) for c in solve_attributes(t, {first.atom: 4, second.atom: 4})] == [(4, None)]


def test_tagged_integers_act_as_integers():
    journal = Journal()
    owner = object()
    n = Tagged(6, Attr(owner, ("n", None), 6), journal)
    assert [n + 1, 1 + n, n - 1, 7 - n, n * 2, n // 4, 13 // n, n % 4, -n, n**2, n / 4, 2**n] == [
        7,
        7,
        5,
        1,
        12,
        1,
        2,
        2,
        -6,
        36,
        1.5,
        64,
    ]
    assert [n == 6, n != 6, n < 7, n > 7, n <= 6, n >= 7] == [True, False, True, False, True, False]
    assert (n * 0.5, 0.5 * n, float(n), list(range(n))) == (3.0, 3.0, 6.0, [0, 1, 2, 3, 4, 5])
    assert {6: "six"}[n] == "six"
    assert torch.zeros(n, 2).shape == (6, 2)
    assert type(pickle.loads(pickle.dumps(n))) is int
    assert type(copy.deepcopy(n)) is int
    assert str((n * 2 + 1).source) == "((object.n * 2) + 1)"


def test_unused_parameters_are_not_offered():
    t = check(Lam(lambda s, x: s.b(torch.relu(s.a(x))), a=nn.Linear(12, 8), b=nn.Linear(8, 5), spare=nn.Linear(4, 4)), tokens())
    assert sizes(t) == [8]
    assert t.skipped["spare.weight[0]"] == "not used in the traced run"


def test_training_only_functions_are_traced_in_evaluation_mode():
    m = Lam(lambda s, x: s.b(F.dropout(torch.relu(s.a(x)), 0.5, s.training)), a=nn.Linear(12, 8), b=nn.Linear(8, 5))
    assert "aten::native_dropout" not in {s.name for s in trace(m.train(), tokens()).steps}


def test_reading_only_the_shape_of_a_slice_freezes_nothing():
    m = Lam(
        lambda s, x: s.b(torch.relu(s.a(x)) + s.pos[: s.a(x)[:, :, -1].shape[1]]),
        a=nn.Linear(12, 8),
        b=nn.Linear(8, 5),
        pos=nn.Parameter(torch.randn(9, 8)),
    )
    assert 8 in sizes(check(m, tokens()))


def test_expert_that_no_token_chose_is_wired_as_its_siblings():
    def forward(s, x):
        flat = x.reshape(-1, 12)
        out = torch.zeros(flat.shape[0], 5, dtype=x.dtype)
        for i in (flat[:, 0] > 1e3).long().unique():
            rows = ((flat[:, 0] > 1e3).long() == i).nonzero()[:, 0]
            out = out.index_add(0, rows, s.experts[int(i)](s.stem(flat[rows])))
        return out

    experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5)) for _ in range(2))
    t = check(Lam(forward, stem=nn.Linear(12, 10), experts=experts), tokens())
    assert sizes(t) == [8, 8, 10]
    stem = next(g for g in t.prunable if g.size == 10)
    assert {m.tensor for m in stem.members} == {"stem.weight", "stem.bias", "experts.0.0.weight", "experts.1.0.weight"}
    assert {m.role for m in group_of(t, "experts.1.0.weight", 0)[0].members} == {"produce", "elementwise", "consume"}
