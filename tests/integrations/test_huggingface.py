"""Pruning in a real `transformers.Trainer`, and the loss that models of transformers return."""

import shutil
import warnings

import pytest
import torch
from torch import nn

import secateur as sc

transformers = pytest.importorskip("transformers")

from secateur.integrations.huggingface import SecateurCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WORDS = 32


def build(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,  # random numbers have to be resumed too
    )
    return transformers.LlamaForCausalLM(config)


def dataset(number=64):
    words = torch.randint(0, WORDS, (number, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


def trainer(folder, callback, model=None, *, steps=12, more=(), **options):
    args = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "save_steps": 6,
            "logging_steps": 3,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
    )
    model = build() if model is None else model
    return transformers.Trainer(model, args, train_dataset=dataset(), eval_dataset=dataset(4), callbacks=[callback, *more])


def schedule():
    return sc.cubic(0.8, start=2, end=10, every=2)


def zeros(model):
    found = {name: p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name and "lm_head" not in name}
    return sum(int((p == 0).sum()) for p in found.values()) / sum(p.numel() for p in found.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps without interruption, and its folder with the checkpoint of step 6."""
    folder = tmp_path_factory.mktemp("whole")
    callback = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")
    run = trainer(folder, callback)
    run.train()
    return run, callback, folder


def test_training_prunes_on_schedule_and_ends_with_plain_zeros(whole):
    run, callback, _ = whole
    assert zeros(run.model) == pytest.approx(0.8, abs=1e-3)
    assert callback.plan.metrics()["sparsity"] == pytest.approx(0.8, abs=1e-3)
    assert not run.optimizer.optimizer._optimizer_step_post_hooks


def test_sparsity_is_in_the_logs(whole):
    run, _, _ = whole
    found = [entry["sparsity"] for entry in run.state.log_history if "loss" in entry]
    assert len(found) == 4
    assert found == sorted(found)
    assert found[-1] == pytest.approx(0.8, abs=1e-3)


def test_training_resumes_in_mid_schedule_bit_for_bit(whole, tmp_path):
    run, callback, folder = whole
    shutil.copytree(folder / "checkpoint-6", tmp_path / "checkpoint-6")
    again = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")
    other = trainer(tmp_path, again, build(seed=5))
    other.train(resume_from_checkpoint=True)
    expected = run.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.model.state_dict().items())
    assert all(torch.equal(mask, callback.plan.masks[name]) for name, mask in again.plan.masks.items())


def test_a_checkpoint_elsewhere_is_named(whole, tmp_path):
    _, _, folder = whole
    with pytest.raises(FileNotFoundError, match="checkpoint=folder"):
        trainer(tmp_path, SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")).train(
            resume_from_checkpoint=str(folder / "checkpoint-6")
        )
    callback = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head", checkpoint=folder / "checkpoint-6")
    trainer(tmp_path, callback).train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    assert callback.plan.metrics()["sparsity"] == pytest.approx(0.8, abs=1e-3)


def test_masks_of_another_run_are_refused(whole, tmp_path):
    _, _, folder = whole
    shutil.copytree(folder / "checkpoint-6", tmp_path / "checkpoint-6")
    other = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")
    trainer(tmp_path / "other", other, build(seed=3), steps=6, save_steps=6).train()
    shutil.copy(tmp_path / "other" / "checkpoint-6" / "pruner.pt", tmp_path / "checkpoint-6" / "pruner.pt")
    again = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")
    with pytest.raises(ValueError, match="come from different checkpoints"):
        trainer(tmp_path, again).train(resume_from_checkpoint=True)


@pytest.fixture(autouse=True)
def _short_runs():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="pruning is not finished")
        yield


def test_a_second_call_of_train_keeps_the_zeros(tmp_path):
    callback = SecateurCallback(sparsity=0.5, exclude="lm_head")
    run = trainer(tmp_path, callback, steps=3, save_strategy="no")
    run.train()
    before = {name: mask.clone() for name, mask in callback.plan.masks.items()}
    run.train()
    assert zeros(run.model) == pytest.approx(0.5, abs=1e-3)
    weights = dict(run.model.named_parameters())
    assert all(not weights[name][~mask].any() for name, mask in before.items())


def test_another_model_starts_anew(tmp_path):
    callback = SecateurCallback(sparsity=0.5, exclude="lm_head")
    for seed in (0, 1):
        run = trainer(tmp_path, callback, build(seed), steps=2, save_strategy="no")
        run.train()
        assert zeros(run.model) == pytest.approx(0.5, abs=1e-3)


def test_run_that_an_error_stopped_resumes_bit_for_bit(whole, tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                raise KeyboardInterrupt

    callback = SecateurCallback(sc.taylor, sparsity=schedule(), exclude="lm_head")
    run = trainer(tmp_path, callback, more=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(Stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the pruner of the stopped run would still prune, and be warned about
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        run.train(resume_from_checkpoint=True)
    expected = whole[0].model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.model.state_dict().items())


def test_two_callbacks_resume_each_its_own_state(tmp_path):
    def callbacks():
        return [SecateurCallback(sparsity=s, include=f"*.{name}.weight") for name, s in (("q_proj", 0.25), ("down_proj", 0.75))]

    trainer(tmp_path, *callbacks()[:1], more=callbacks()[1:], steps=3, save_steps=3).train()
    assert {file.name for file in (tmp_path / "checkpoint-3").glob("pruner*")} == {"pruner.pt", "pruner-1.pt"}
    first, second = callbacks()
    trainer(tmp_path, first, build(seed=5), more=[second], steps=5, save_steps=9).train(resume_from_checkpoint=True)
    assert [one.plan.metrics()["sparsity"] for one in (first, second)] == pytest.approx([0.25, 0.75], abs=1e-3)
    assert all("q_proj" in name for name in first.plan.masks)


def test_frozen_weights_under_adapters_are_named(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match=r"frozen, as under adapters of PEFT.*sc\.prune_"):
        trainer(tmp_path, SecateurCallback(sparsity=0.5, exclude="*lm_head*"), model, steps=1, save_strategy="no").train()


def test_the_best_model_keeps_its_own_zeros(tmp_path):
    class First(transformers.TrainerCallback):
        """An evaluation that is best at the first checkpoint."""

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = float(state.global_step)

    callback = SecateurCallback(sparsity=sc.linear(0.8, start=0, end=8), exclude="lm_head")
    run = trainer(
        tmp_path,
        callback,
        steps=8,
        more=[First()],
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    with pytest.warns(UserWarning, match="pruning is not finished"):
        run.train()
    assert run.state.best_global_step == 4
    assert zeros(run.model) == pytest.approx(0.4, abs=1e-2)


def test_schedules_count_optimizer_steps_when_gradients_are_accumulated(tmp_path):
    callback = SecateurCallback(sparsity=sc.linear(0.6, start=0, end=3), exclude="lm_head")
    run = trainer(tmp_path, callback, steps=3, save_strategy="no", gradient_accumulation_steps=2)
    run.train()
    assert run.state.global_step == callback.pruner.state_dict()["step"] == 3
    assert zeros(run.model) == pytest.approx(0.6, abs=1e-3)


def test_reporters_after_the_callback_see_the_sparsity(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers.integrations import TensorBoardCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = SecateurCallback(sparsity=0.5, exclude="lm_head")
    trainer(tmp_path, callback, steps=3, save_strategy="no", more=[TensorBoardCallback()]).train()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert events.Scalars("train/sparsity")[0].value == pytest.approx(0.5, abs=1e-3)


def test_unknown_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match=r"those of sc\.Pruner.*amount"):
        SecateurCallback(amount=0.5)


# --- the loss of the output -----------------------------------------------------------------------------------------


def batches(labels=True):
    rows = [torch.stack([one["input_ids"] for one in dataset(4)])] * 2
    return [{"input_ids": row, **({"labels": row} if labels else {})} for row in rows]


@pytest.mark.parametrize("as_iterator", [False, True])
def test_the_loss_of_the_output_is_found(as_iterator):
    model = build().eval()
    expected = sc.plan(
        model, sc.taylor, sparsity=0.5, data=batches(), loss=lambda output, batch: output.loss, exclude="lm_head"
    )
    data = iter(batches()) if as_iterator else batches()
    found = sc.plan(model, sc.taylor, sparsity=0.5, data=data, exclude="lm_head")
    assert all(torch.equal(found.masks[name], mask) for name, mask in expected.masks.items())


def test_shrink_finds_the_loss_of_the_output():
    small, _ = sc.shrink(build().eval(), batches()[0], sc.taylor, params=0.8, data=batches(), exclude="lm_head")
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in build().parameters())


def test_batches_without_labels_are_named():
    with pytest.raises(ValueError, match=r"holds no loss, so pass loss=.*hold labels"):
        sc.plan(build().eval(), sc.taylor, sparsity=0.5, data=batches(labels=False), exclude="lm_head")


def test_tensors_still_need_a_loss_before_anything_runs():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            raise AssertionError("ran")

    with pytest.raises(ValueError, match="so pass loss="):
        sc.plan(Unused(), sc.taylor, sparsity=0.5, data=[torch.ones(2, 4)])
