"""A minimal cut made from a trace (index_select and attributes), and reference runs to compare it with."""

import contextlib
import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from secateur.axes import atoms, families, keep_mask, new_size, reshape
from secateur.edit import owned_tensors, plain_kernels
from secateur.trace import main_outputs, plan_counts, solve_attributes, trace

# Operators whose result for one unit depends on the other units. In the reference run they get the kept units only.
COLLECTIVE = {
    *(
        "mean",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "native_layer_norm",
        "_fused_rms_norm",
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
    ),
    *("linalg_vector_norm", "native_group_norm", "amax", "amin", "max", "min", "native_batch_norm", "_native_batch_norm_legit"),
    *("logsumexp", "prod", "norm"),
}


def seeded(model, seed=0):
    """Returns the model in float64, with noise on parameters that start as zeros or ones, where mistakes would not show."""
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=draw) * (0.1 if p.dim() < 2 else 0.02)
    return model.double().eval()


def choose(t, groups, seed, ratio=0.5, multiple_of=1):
    """Returns a random legal choice of units as {atom: mask}."""
    draw = torch.Generator().manual_seed(seed)
    wanted = {g: max(1, round(g.size * ratio)) for g in groups}
    plan = plan_counts(t, wanted, multiple_of)
    keep = {}
    for g, n in plan.counts.items():
        mask = torch.zeros(g.size, dtype=torch.bool)
        mask[torch.randperm(g.size, generator=draw)[:n]] = True
        keep[g.atom] = mask
    return keep


def cut_(model, t, keep):
    """Cuts the traced model in place, and returns the changed attributes."""
    changes = solve_attributes(t, keep)
    for name, tensor in owned_tensors(model).values():
        data = tensor.data
        for d, e in enumerate(t.dims[name]):
            mask = keep_mask(e, keep)
            if not mask.all():
                data = data.index_select(d, mask.nonzero()[:, 0])
        if data.shape != tensor.shape:
            tensor.data = data.contiguous()
    for change in changes:
        name, index = change.key
        space = vars(change.owner)
        if index is None:
            space[name] = change.new
        elif isinstance(space[name], tuple):
            space[name] = tuple(change.new if i == index else v for i, v in enumerate(space[name]))
        else:
            space[name][index] = change.new
    return changes


def zero_(model, t, keep):
    """Zeroes the units that a cut would remove in every parameter, in place."""
    for name, tensor in owned_tensors(model).values():
        if isinstance(tensor, nn.Parameter):
            for d, e in enumerate(t.dims[name]):
                tensor.data = tensor.data.clone().index_fill_(d, (~keep_mask(e, keep)).nonzero()[:, 0], 0)
    return model


class OnKeptUnits(TorchDispatchMode):
    """Replays a run. COLLECTIVE operators get the kept units only, and every operator returns zeros for removed units."""

    def __init__(self, t, keep):
        super().__init__()
        self.trace, self.keep, self.at = t, keep, 0
        self.counts = {a: int(m.sum()) for a, m in keep.items()}
        self.untouched = {a for axes in t.axes for e in axes for a in atoms(e)} - {a for a, m in keep.items() if not m.all()}

    def small(self, tensor, axes):
        for d, e in enumerate(axes):
            tensor = tensor.index_select(d, keep_mask(e, self.keep).nonzero()[:, 0])
        return tensor

    def full(self, tensor, axes):
        for d, e in enumerate(axes):
            mask = keep_mask(e, self.keep)
            if not mask.all():
                shape = [len(mask) if i == d else n for i, n in enumerate(tensor.shape)]
                tensor = tensor.new_zeros(shape).index_copy_(d, mask.nonzero()[:, 0], tensor)
        return tensor

    def zero_removed(self, func, out, numbers):
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return out  # a view: the removed units of its base are zero already
        for tensor, number in zip(out if isinstance(out, tuple | list) else (out,), numbers):
            for d, e in enumerate(self.trace.axes[number]):
                if tensor.is_floating_point() and not self.untouched.issuperset(atoms(e)) and not families(e):
                    tensor.index_fill_(d, (~keep_mask(e, self.keep)).nonzero()[:, 0], 0)
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        step = self.trace.steps[self.at]
        self.at += 1
        name = func.overloadpacket.__name__
        assert step.func is func, f"the replay left the traced run: {step.func} then, {func} now"
        axes = [self.trace.axes[r.number] if hasattr(r, "number") else None for r in step.args]
        # the softmax of attention runs over the keys, which matters if keys are removed (class tokens)
        over_keys = "scaled_dot_product" in name and not self.untouched.issuperset(atoms(axes[1][-2]))
        if name not in COLLECTIVE and not over_keys:
            return self.zero_removed(func, func(*args, **kwargs), step.outs)
        numbers = {k: r.number for k, r in step.kwargs.items() if hasattr(r, "number")}
        kwargs = {k: self.small(v, self.trace.axes[numbers[k]]) if k in numbers else v for k, v in kwargs.items()}
        inputs = [self.small(a, x) if x is not None else a for a, x in zip(args, axes)]
        if name in ("native_layer_norm", "_fused_rms_norm"):
            inputs[1] = list(inputs[0].shape[-len(inputs[1]) :])
        if name == "native_group_norm":
            groups = reshape([axes[0][1]], [args[6], axes[0][1].size // args[6]])[0]
            inputs[3:7] = [*inputs[0].shape[:2], inputs[0][0, 0].numel(), new_size(groups, self.counts)]
        out = func(*inputs, **kwargs)
        several = out if isinstance(out, tuple) else (out,)
        made = tuple(self.full(o, self.trace.axes[n]) for o, n in zip(several, step.outs))
        if over_keys:  # restore the memory layout; otherwise the run continues with other operators
            made = (made[0].transpose(1, 2).contiguous().transpose(1, 2), *made[1:])
        return made if isinstance(out, tuple) else made[0]


def run(model, inputs, *modes):
    given, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    given, named = tuple(x.clone() for x in given), {k: x.clone() for k, x in named.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
        torch.manual_seed(0)  # some models draw random numbers in their forward pass
        for mode in modes:
            stack.enter_context(mode)
        out = model(*given, **named)
        stack.close()
    leaves = [o for o in tree_leaves(main_outputs(out)) if isinstance(o, torch.Tensor)]
    return out if isinstance(out, torch.Tensor) else torch.cat([o.reshape(-1) for o in leaves])


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def sliced(model, t, keep):
    """Returns a cut copy of the traced model."""
    small = copy.deepcopy(SimpleNamespace(model=model, trace=t, keep=keep))  # copied together: the trace owns the modules
    cut_(small.model, small.trace, small.keep)
    return small.model


def wiring_error(model, inputs, draws=3):
    """Returns the largest difference between cut models and the full model run on the kept units, for random choices."""
    from secateur.edit import apply_cuts_
    from secateur.surgery.cut import cuts_of  # unlike cut_, it also gives modules a config of their own

    t, worst = trace(model, inputs), 0.0
    usable = [g for g in t.prunable if "scale" not in g.flags]
    for seed, ratio in zip(range(draws), (0.3, 0.5, 0.7)):
        keep = choose(t, usable, seed, ratio)
        expected = run(zero_(copy.deepcopy(model), t, keep), inputs, plain_kernels(), OnKeptUnits(t, keep))
        small = apply_cuts_(copy.deepcopy(model), cuts_of(t, keep))
        worst = max(worst, difference(run(small, inputs), expected))
    return worst


def check(model, *inputs, across=False, draws=3, ratios=(0.3, 0.5, 0.7), only=None, moves=True, least=1, multiple_of=1):
    """Cuts random units three times, and checks the cut model against the model with the same units zeroed.

    With `across`, units are removed across normalisations, and the reference is the replay on the kept units. The output must
    also differ from the dense model's, unless `moves` is False.
    """
    model = seeded(model)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    dense = run(model, inputs)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    t = trace(model, inputs)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not t.unknown
    assert not t.record.errors, t.record.errors
    usable = [g for g in t.prunable if (g.exact or across) and "scale" not in g.flags and (only is None or only(g))]
    assert len(usable) >= least, (t.groups, t.skipped)
    moved, before = 0, None
    for seed, ratio in zip(range(draws), ratios):
        keep = choose(t, usable, seed, ratio, multiple_of)
        zeroed = zero_(copy.deepcopy(model), t, keep)
        expected = run(zeroed, inputs, *((plain_kernels(), OnKeptUnits(t, keep)) if across else ()))
        small = sliced(model, t, keep)
        before = sum(p.numel() for p in model.parameters())
        assert sum(p.numel() for p in small.parameters()) < before or not any((~m).any() for m in keep.values())
        got = run(small, inputs)
        assert got.shape == dense.shape
        assert difference(got, expected) < 1e-9, (seed, difference(got, expected), keep)
        moved += difference(got, dense) > 1e-6
    assert moved or not moves
    return t


@contextlib.contextmanager
def unchanged(model):
    """Checks that the model has the same tensors, values and attributes before and after."""

    def picture():
        return {
            id(m): ({k: v for k, v in vars(m).items() if not isinstance(v, dict)}, dict(m._parameters), dict(m._buffers))
            for m in model.modules()
        }

    before, values = picture(), {k: v.clone() for k, v in model.state_dict().items()}
    yield
    after = picture()
    assert before.keys() == after.keys()
    for key, (plain, parameters, buffers) in before.items():
        for old, new in zip((plain, parameters, buffers), after[key]):
            assert old.keys() == new.keys()
            assert all(old[k] is new[k] and type(old[k]) is type(new[k]) for k in old)
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())


def sizes(t):
    return sorted(g.size for g in t.prunable)


def group_of(t, name, dim):
    """Returns the groups of the atoms in a dim of a tensor."""
    return [t.by_atom[a] for a in dict.fromkeys(atoms(t.dims[name][dim]))]
