"""The command `secateur`: sources of models and data, JSON, exit codes, errors in one line, files written whole."""

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.shell_completion import get_completion_class
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import secateur as sc
from secateur.cli import main

NETS = '''
import time
from pathlib import Path
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    features = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(3)]

def endless():
    while True:
        yield from batches()

def narrow():
    return [torch.randn(4, 2, 8, 8)]

def inputs():
    return torch.randn(2, 3, 8, 8)

def fails():
    raise RuntimeError("no weights here")

def word(model):
    return "good"

def share(model):
    return float((model[4].weight == 0).float().mean())

class Slow(nn.Sequential):
    """Takes its time when it is saved."""
    def state_dict(self, *args, **kwargs):
        Path("saving").touch()
        time.sleep(20)
        return super().state_dict(*args, **kwargs)

def slow():
    return Slow(nn.Linear(64, 64))
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the module `cli_nets`, which is the current folder."""
    (tmp_path / "cli_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("cli_nets", None)


def run(*words, code=0):
    """Runs a command in this process. Returns its standard output, or its standard error if it fails."""
    result = CliRunner().invoke(main, [part for word in words for part in shlex.split(str(word))])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


def answer(*words):
    return json.loads(run(*words, "--json"))


def start(*words, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "secateur", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options)


def build():
    import cli_nets

    return cli_nets.net().eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Hugging Face folder with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate(["[UNK]", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


# --- help, exit codes, speed ----------------------------------------------------------------------------------------------


def test_help_is_quick_and_imports_no_torch(here):
    """Processor time, which other programs on the machine do not change."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = start("--help")
        out, _ = process.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert process.returncode == 0
        assert "inspect" in out
    assert min(seconds) < 0.3
    call = "main(['prune', '--help'], standalone_mode=False)"
    code = f"import sys; from secateur.cli import main; {call}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False\n")


def test_exit_codes_of_the_real_program(here):
    codes = {}
    for words in (["recipes", "check", "wanda-2-4"], ["inspect", "cli_nets:fails"], ["prun"], ["inspect", "nowhere"]):
        process = start(*words)
        _, err = process.communicate()
        codes[words[-1]] = process.returncode
        assert "Traceback" not in err
    assert codes == {"wanda-2-4": 0, "cli_nets:fails": 1, "prun": 2, "nowhere": 2}


def test_every_command_has_help():
    for name, command in main.commands.items():
        assert run(name, "--help")
        for inner in getattr(command, "commands", {}):
            assert run(name, inner, "--help")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    assert "_SECATEUR_COMPLETE" in run("completion", shell)


def test_the_shell_completes_names_of_files():
    shell = get_completion_class("bash")(main, {}, "secateur", "_SECATEUR_COMPLETE")
    for words in (["inspect"], ["prune", "m:n", "--data"], ["report", "a"]):
        assert [item.type for item in shell.get_completions(words, "mod")] == ["file"]


@pytest.mark.parametrize(
    ("words", "begin", "found"),
    [
        ([], "pr", ["prune"]),
        (["recipes", "show"], "wa", ["wanda-2-4"]),
        (["prune", "net:net"], "--spa", ["--sparsity"]),
        (["prune", "net:net", "--scope"], "r", ["row"]),
    ],
)
def test_completion_finds_commands_options_values_and_recipes(words, begin, found):
    shell = get_completion_class("bash")(main, {}, "secateur", "_SECATEUR_COMPLETE")
    assert [item.value for item in shell.get_completions(words, begin)] == found


def test_the_package_declares_the_program():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"secateur": "secateur.cli:main"}


# --- inspect --------------------------------------------------------------------------------------------------------------


def test_inspect_says_what_can_be_pruned_and_why_not(here):
    text = run("inspect cli_nets:net --all")
    assert "4.weight  Linear  16x8" in text
    assert "not pruned by default, 3: a vector" in text
    found = answer("inspect cli_nets:net")
    assert [layer["name"] for layer in found["layers"]] == ["0.weight", "4.weight", "6.weight"]
    assert found["parameters"] == sum(p.numel() for p in build().parameters())


def test_inspect_of_a_compressed_model_names_its_layers(here):
    model = build()
    sc.prune_(model, sparsity=0.9, include="4")
    sc.compress_(model, torch.randn(2, 3, 8, 8), objective="size")
    sc.save(model, "packed")
    found = answer("inspect cli_nets:net --checkpoint packed")
    assert [(layer["kind"], layer["prunable"]) for layer in found["layers"]] == [
        ("Conv2d", True),
        ("Linear", False),
        ("Linear", True),
    ]
    assert found["parameters"] == sum(p.numel() for p in build().parameters())
    assert found["others"]["4.bias"] == "its layer is compressed; sc.decompress_ makes it dense again"


def test_inspect_counts_tied_weights_once(here):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

    sc.save(Tied(), "tied")
    found = answer("inspect tied")
    assert (found["parameters"], found["bytes"]) == (16 * 8, 16 * 8 * 4)


def test_inspect_measures_time_on_inputs(here):
    assert answer("inspect cli_nets:net --bench --inputs 1x3x8x8")["time"]["median"] > 0
    assert "--inputs" in run("inspect cli_nets:net --bench", code=2)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "ckpt"])
def test_inspect_reads_weight_files(here, suffix):
    state, file = build().state_dict(), here / f"weights.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state if suffix == "pt" else {"state_dict": state}, file)
    found = answer("inspect", file)
    assert [layer["shape"] for layer in found["layers"]] == [[8, 3, 3, 3], [16, 8], [4, 16]]
    assert found["bytes_on_disk"] == file.stat().st_size


def test_inspect_reads_our_folders_with_and_without_the_model(here):
    model = build()
    sc.prune_(model, pattern="2:4", include="4")
    sc.save(model, here / "ours")
    for words in (["ours"], ["cli_nets:net", "--checkpoint", "ours"]):
        found = answer("inspect", *words)
        assert found["layers"][1]["pattern"] == "2:4"
        assert found["history"][0][0] == "prune"


# --- prune, shrink, compress, recipes, bench ------------------------------------------------------------------------------


def test_prune_does_what_prune_does(here):
    found = answer("prune cli_nets:net --sparsity 0.5 --criterion wanda --scope row --data cli_nets:batches -o out")
    import cli_nets

    model = build()
    sc.prune_(model, sc.wanda, sparsity=0.5, scope="row", data=cli_nets.batches())
    made = sc.load("out", build)
    assert all(map(torch.equal, made.state_dict().values(), model.state_dict().values()))
    assert found["results"][0]["sparsity"] == pytest.approx(0.5, abs=0.02)
    assert found["output"] == "out"
    assert sc.Recipe.load("out") == sc.Recipe.of(model)


def test_other_arguments_are_set_by_name(here):
    found = answer("prune cli_nets:net --set count=2 --set pattern=out --include 4 -o out")
    assert found["recipe"]["stages"] == [{"prune": {"include": ["4"], "count": 2, "pattern": "out"}}]
    assert int((sc.load("out", build)[4].weight == 0).all(1).sum()) == 2


def test_evaluate_is_called_before_and_after(here):
    found = answer("prune cli_nets:net --sparsity 0.5 --evaluate cli_nets:share --dry-run")
    assert found["evaluate"] == {"before": 0.0, "after": 0.5}
    assert "output" not in found


def test_shrink_and_compress(here):
    run("shrink cli_nets:net --channels 0.5 --set scope=tensor --inputs 1x3x8x8 -o small")
    assert sc.load("small", build)[4].weight.shape == (8, 4)
    run("prune cli_nets:net --checkpoint small --sparsity 0.9 -o sparse")
    found = answer("compress cli_nets:net --checkpoint sparse --objective size --inputs cli_nets:inputs -o packed")
    assert [stage for each in sc.Recipe.load("packed").to_dict()["stages"] for stage in each] == ["shrink", "prune", "compress"]
    assert found["results"][0]["objective"] == "size"
    times = answer("bench cli_nets:net cli_nets:net --inputs 1x3x8x8 --seconds 0.01")["seconds"]
    assert list(times) == ["cli_nets:net (1)", "cli_nets:net (2)"]


def test_report_compares_two_models(here):
    run("prune cli_nets:net --sparsity 0.5 -o out")
    found = answer("report cli_nets:net out --data cli_nets:batches --seconds 0 -o page.html")
    assert [stage["metric"]["name"] for stage in found["stages"]] == ["accuracy", "accuracy"]
    assert Path("page.html").read_text().startswith("<!doctype html>")
    run("report cli_nets:net out --evaluate cli_nets:share --metric zeros --seconds 0 -o page.json")
    assert json.loads(Path("page.json").read_text())["stages"][1]["metric"]["value"] == 0.5
    assert "ends in .html or .json" in run("report cli_nets:net out -o page.txt", code=2)


def test_the_demo_keeps_a_model_and_a_report(here, monkeypatch):
    from secateur.cli import demo

    monkeypatch.setattr(demo, "STEPS", 10)
    found = answer("demo -o made")
    assert len(found["rows"]) == 4
    assert (here / "made" / "report.html").exists()
    assert sc.load(here / "made" / "model", demo._network)


def test_batches_that_are_left_out_are_named(here):
    words = ["prune", "cli_nets:net", "--criterion", "wanda", "--sparsity", "0.5", "--dry-run"]
    said = CliRunner().invoke(main, [*words, "--data", "cli_nets:endless"]).stderr
    assert said == "secateur: used 16 of the batches of cli_nets:endless; --batches takes more\n"
    assert not CliRunner().invoke(main, [*words, "--data", "cli_nets:batches", "--batches", "3"]).stderr


def test_recipes_are_listed_shown_checked_and_run(here):
    assert set(answer("recipes list")["recipes"]) >= {"wanda-2-4", "magnitude-80"}
    assert run("recipes") == run("recipes list")
    assert "pattern: '2:4'" in run("recipes show wanda-2-4")
    run("recipes show magnitude-80 -o mine.yaml")
    assert "no mistakes" in run("recipes check mine.yaml")
    run("recipes run mine.yaml cli_nets:net -o out")
    assert sc.Recipe.load("out") == sc.Recipe.load("mine.yaml")
    assert "criterion: magnitude" in run("recipes show out")
    Path("mine.yaml").write_text("version: 1\nstages: [{prune: {sparsty: 1}}]")
    assert "mine.yaml: stages[0].prune.sparsty: unknown field" in run("recipes check mine.yaml", code=1)


def test_a_weight_file_is_pruned_to_a_weight_file(here):
    save_file(build().state_dict(), "weights.safetensors")
    run("prune weights.safetensors --sparsity 0.5 --include *.weight -o sparse.safetensors")
    assert float((load_file("sparse.safetensors")["4.weight"] == 0).float().mean()) == 0.5
    assert "name the tensors to prune in --include," in run(
        "prune", "weights.safetensors", "--sparsity", 0.5, "-o", "x.safetensors", code=1
    )
    assert "weights alone" in run(
        "shrink", "weights.safetensors", "--channels", 0.5, "--inputs", "1x8", "-o", "x.safetensors", code=2
    )


def test_gates_are_not_dropped_by_writing_weights_alone(here):
    model = build()
    sc.gate_(model, at="4", method="topk")
    sc.save(model, "gated")
    prune = "--sparsity 0.5 --include *.weight -o"
    assert "a model with gates" in run(f"prune gated {prune} x.safetensors", code=2)
    assert not Path("x.safetensors").exists()
    run(f"prune cli_nets:net --checkpoint gated {prune} sparse")
    assert "gates" in json.loads(Path("sparse/secateur.json").read_text())


def test_hugging_face_folders_with_a_text_file(here, llama):
    from transformers import AutoTokenizer, LlamaForCausalLM

    Path("text.txt").write_text("a b c d e f g h i j k l m n o p " * 40)
    words = "--data text.txt --length 16 --batch-size 4 --batches 3"
    found = answer("prune", llama, "--pattern", "2:4", "--criterion", "wanda", words, "-o", "out")
    assert found["from_pretrained"] is True
    again = LlamaForCausalLM.from_pretrained("out")
    assert float((again.model.layers[0].mlp.up_proj.weight == 0).float().mean()) == 0.5
    assert AutoTokenizer.from_pretrained("out")("a b")["input_ids"] == [1, 2]
    larger = AutoTokenizer.from_pretrained(llama)
    larger.add_tokens([f"{c}x" for c in "abcdefghijklmnopqrstuvwxyz"])
    larger.save_pretrained("larger")
    Path("more.txt").write_text("zx yx " * 40)
    other = ("--data more.txt --length 16 --tokenizer larger --sparsity 0.5 -o x",)
    assert "more tokens than the 32 that the model knows" in run("prune", llama, *other, code=1)
    assert "holds no tokenizer that loads" in run("prune", llama, other[0].replace("larger", "."), code=1)
    small = answer("shrink out --channels 0.5 --set scope=tensor --exclude *self_attn* --inputs 1x8 -o small")
    assert [stage for each in sc.Recipe.load("small").to_dict()["stages"] for stage in each] == ["prune", "shrink"]
    assert small["results"][0]["totals"]["params"][1] < small["results"][0]["totals"]["params"][0]
    assert answer("inspect small")["layers"]
    assert answer("prune", llama, "--sparsity 0.5 --criterion taylor --dry-run", words)["results"][0]["sparsity"] == 0.5


def test_a_folder_that_no_config_describes_is_opened_again_without_a_factory(here, llama):
    small = answer("shrink", llama, "--params 0.8 --inputs 1x8 -o small")
    assert "only sc.load" in small["from_pretrained"]
    printed = run("shrink", llama, "--params 0.8 --inputs 1x8 -o small --force")
    assert "bytes\nfrom_pretrained does not load it, sc.load does: the model " in printed
    sparse = answer("prune small --sparsity 0.5 -o sparse")
    assert sparse["results"][0]["sparsity"] == pytest.approx(0.5, abs=0.01)
    answer("compress sparse --objective size --inputs 1x8 -o packed")
    assert [step for step, _ in answer("inspect packed")["history"]] == ["shrink", "prune", "compress"]
    assert answer("bench packed --inputs 1x8")
    assert not Path("packed/config.json").exists()  # from_pretrained would fill a model of the old size
    sc.save(build(), "packed")
    assert not Path("packed/secateur.config.json").exists()


def test_a_config_beside_a_cut_model_names_models_of_transformers_only_and_runs_no_code(here, llama):
    answer("shrink", llama, "--params 0.8 --inputs 1x8 -o small")
    beside = Path("small/secateur.config.json")
    config = json.loads(beside.read_text())
    Path("small/own.py").write_text("raise SystemExit(7)")
    for name in ("pipeline", "../own", "LlamaConfig"):
        beside.write_text(json.dumps(config | {"architectures": [name]}))
        assert f"names {name!r} as its architecture, which is no model" in run("inspect small", code=1)
    beside.write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    assert "Do you wish to run the custom code" not in run("inspect small", code=1)
    beside.write_text("[]")
    assert "is no config of Hugging Face" in run("inspect small", code=1)


def test_a_folder_is_pruned_from_disk_as_in_memory(here, llama):
    Path("text.txt").write_text("a b c d e f g h i j k l m n o p " * 40)
    words = "--data text.txt --length 16 --batch-size 4 --batches 3"
    for how in ("--sparsity 0.5 --scope global", f"--pattern 2:4 --method sparsegpt --exclude lm_head {words}"):
        found = answer("prune", llama, how, "--from-disk --force -o disk")
        loaded = answer("prune", llama, how, "--force -o memory")["results"][0]
        assert {name: one["kept"] for name, one in found["layers"].items()} == {
            name: one["kept"] for name, one in loaded["layers"].items()
        }
        memory, disk = (
            {n: t for file in Path(folder).glob("*.safetensors") for n, t in load_file(file).items()}
            for folder in ("memory", "disk")
        )
        assert memory.keys() == disk.keys()
        assert all(torch.equal(disk[name], tensor) for name, tensor in memory.items())
        assert Path("disk/tokenizer.json").is_file()
    assert "disk exists; --force" in run("prune", llama, "--sparsity 0.5 --from-disk -o disk", code=2)
    Path("disk/secateur.journal.0.json").write_text("{}")  # of a run that was stopped
    assert "unfinished run with another recipe" in run("prune", llama, "--sparsity 0.5 --from-disk -o disk", code=1)
    assert "--dry-run needs the whole model" in run("prune", llama, "--sparsity 0.5 --from-disk --dry-run", code=2)
    assert "is not a folder" in run("prune cli_nets:net --sparsity 0.5 --from-disk -o x", code=2)


def test_a_folder_without_a_config_is_pruned_from_disk_by_names_or_by_a_factory(here):
    Path("dense").mkdir()
    save_file(build().state_dict(), "dense/model.safetensors")
    run("prune dense --sparsity 0.5 --include 4.weight --from-disk -o named")
    run("prune cli_nets:net --checkpoint dense --sparsity 0.5 --include 4 --from-disk -o built")
    assert Path("named/model.safetensors").read_bytes() == Path("built/model.safetensors").read_bytes()
    assert float((load_file("named/model.safetensors")["4.weight"] == 0).float().mean()) == 0.5
    assert "say which tensors are pruned" in run("prune dense --sparsity 0.5 --from-disk -o x", code=1)


def test_a_folder_of_images(here):
    from PIL import Image

    for kind in ("cats", "dogs"):
        (here / "images" / kind).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (20, 10), (40 * i, 90, 10)).save(here / "images" / kind / f"{i}.png")
    words = "--data images --size 8x8 --batch-size 2"
    found = answer("prune cli_nets:net --criterion taylor --loss cross_entropy --sparsity 0.5 -o out", words)
    assert found["results"][0]["sparsity"] == pytest.approx(0.5, abs=0.02)
    (here / "empty").mkdir()
    assert "holds no image" in run("prune cli_nets:net --sparsity 0.5 --data empty -o x", code=1)


PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"


def test_commands_of_the_page_run_and_print_what_it_shows(here):
    text = PAGE.read_text(encoding="utf-8")
    (here / "nets.py").write_text(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    try:
        for block in blocks:
            for command, shown in re.findall(r"^\$ secateur (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
                printed = run(command)
                assert not shown or printed == shown
    finally:
        sys.modules.pop("nets", None)
    assert sum(block.count("$ secateur") for block in blocks) >= 10
    assert (here / "again" / "secateur.json").exists()


# --- mistakes: one clear line ----------------------------------------------------------------------------------------------

MISTAKES = {
    "missing file": (["inspect", "nowhere.pt"], 2, "nowhere.pt: no such file or folder, and not of the form module:factory"),
    "missing module": (["inspect", "no_such_module:net"], 1, "the module no_such_module does not import: ModuleNotFoundError"),
    "missing factory": (["inspect", "cli_nets:nett"], 1, "cli_nets has no 'nett'. Did you mean 'net'"),
    "factory fails": (["inspect", "cli_nets:fails"], 1, "cli_nets:fails() raised RuntimeError: no weights here"),
    "not a model": (["inspect", "cli_nets:inputs"], 1, "returned Tensor; expected a torch.nn.Module"),
    "missing checkpoint": (["inspect", "cli_nets:net", "--checkpoint", "gone"], 2, "gone: no such file or folder"),
    "typo of an option": (["prune", "cli_nets:net", "--sparsty", "0.5"], 2, "--sparsity"),
    "typo of a value": (["prune", "cli_nets:net", "--sparsity", "half"], 2, "is not a valid float"),
    "percent": (["prune", "cli_nets:net", "--sparsity", "50%"], 2, "; 50 % is 0.5 (see"),
    "percent without a sign": (["prune", "cli_nets:net", "--sparsity", "50"], 2, "range 0<=x<=1; 50 % is 0.5 (see"),
    "percent of channels": (["shrink", "cli_nets:net", "--channels", "50%", "-o", "x"], 2, "50 % is 0.5"),
    "typo of a criterion": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--criterion", "wandaa", "-o", "x"],
        2,
        "Did you mean 'wanda'",
    ),
    "option of another library": (
        ["shrink", "cli_nets:net", "--pruning-ratio", "0.5", "-o", "x"],
        2,
        "--channels, --params, --flops or --latency is the fraction that remains",
    ),
    "data of another library": (["prune", "cli_nets:net", "--calib-data", "x"], 2, "; --data takes module:function"),
    "typo of an argument": (["prune", "cli_nets:net", "--set", "flor=0.1", "-o", "x"], 2, "Did you mean 'floor'"),
    "no budget": (["prune", "cli_nets:net", "-o", "x"], 2, "say how much to prune"),
    "no output": (["prune", "cli_nets:net", "--sparsity", "0.5"], 2, "--output"),
    "no inputs": (["shrink", "cli_nets:net", "--channels", "0.5", "-o", "x"], 2, "pass --inputs with a shape"),
    "inputs of the wrong shape": (
        ["shrink", "cli_nets:net", "--channels", "0.5", "--inputs", "1x5x8x8", "-o", "x"],
        1,
        "the model does not run on 1x5x8x8 (float32 1x5x8x8): Given groups=1",
    ),
    "data of the wrong shape": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--data", "cli_nets:narrow", "-o", "x"],
        1,
        "the model does not run on cli_nets:narrow (float32 4x2x8x8)",
    ),
    "no data": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--criterion", "wanda", "-o", "x"],
        1,
        "needs input_norm, so pass --data (an iterable of batches)\n",
    ),
    "no data for a method": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--method", "flow", "-o", "x"],
        1,
        "admm(steps=8, target=flow(0.5, 0.75), reorder=True) needs inputs, so pass --data",
    ),
    "an unknown name": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--include", "gone", "-o", "x"],
        1,
        "secateur: --include='gone' matches",
    ),
    "an argument twice": (["prune", "cli_nets:net", "--sparsity", "0.5", "--set", "sparsity=0.6", "-o", "x"], 2, "given twice"),
    "a value that is no YAML": (["prune", "cli_nets:net", "--set", "count=[1", "-o", "x"], 2, "'[1' cannot be read"),
    "an evaluation that fails": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--evaluate", "cli_nets:word", "-o", "x"],
        1,
        "cli_nets:word failed: ValueError",
    ),
    "missing data": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--data", "gone", "-o", "x"],
        2,
        "gone: no such file or folder",
    ),
    "a text file without a tokenizer": (
        ["prune", "cli_nets:net", "--sparsity", "0.5", "--data", "cli_nets.py", "-o", "x"],
        2,
        "needs --tokenizer",
    ),
    "unknown recipe": (["recipes", "show", "wanda-24"], 1, "Did you mean 'wanda-2-4'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line(here, name):
    words, code, message = MISTAKES[name]
    err = run(*words, code=code)
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("secateur: ")
    assert not (here / "x").exists()


def test_errors_are_json_too(here):
    result = CliRunner().invoke(main, ["inspect", "cli_nets:fails", "--json"])
    assert json.loads(result.stdout) == {"error": "cli_nets:fails() raised RuntimeError: no weights here"}
    assert result.exit_code == 1
    result = CliRunner().invoke(main, ["prune", "cli_nets:net", "--json", "--sparsty", "1"])
    assert "--sparsity" in json.loads(result.stdout)["error"]
    assert result.exit_code == 2


def test_files_that_are_no_models(here):
    Path("text.pt").write_text("hello")
    assert "nor a state dict that torch.save wrote" in run("inspect text.pt", code=1)
    torch.save(build(), "whole.pt")
    assert "holds Python objects" in run("inspect whole.pt", code=1)
    Path("text.safetensors").write_text("hello")
    assert "is not a safetensors file" in run("inspect text.safetensors", code=1)
    Path("folder").mkdir()
    assert "holds neither config.json" in run("inspect folder", code=1)
    torch.save({"state_dict": {"other.weight": torch.zeros(2, 2)}}, "other.pt")
    assert "does not fit the model: Missing key" in run("inspect cli_nets:net --checkpoint other.pt", code=1)


def test_an_output_that_exists_is_kept_unless_forced(here):
    words = ("prune", "cli_nets:net", "--sparsity", 0.5, "-o", "out")
    run(*words)
    assert "out exists; --force replaces it" in run(*words, code=2)
    run(*words, "--force")
    save_file(build().state_dict(), "weights.safetensors")
    itself = ("prune", "weights.safetensors", "--sparsity", 0.5, "--include", "*", "--force", "-o", "weights.safetensors")
    assert "is the model itself" in run(*itself, code=2)


# --- files are written whole, or not at all --------------------------------------------------------------------------------


def test_an_interrupt_leaves_no_files(here):
    def listen() -> None:  # a background job of a shell ignores interrupts, and so do the processes that it starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = start("prune", "cli_nets:slow", "--sparsity", 0.5, "-o", "out", cwd=here, preexec_fn=listen)
    for _ in range(1200):
        if (here / "saving").exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "secateur: interrupted; no file is half written\n"
    assert not (here / "out").exists()


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a small file system in a folder."""
    made = []

    def mount(options):
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system needs root")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_named_and_nothing_stays_there(here, disk):
    folder = disk("size=4k")
    err = run("prune", "cli_nets:net", "--sparsity", 0.5, "-o", folder / "out", code=1)
    assert "the disk is full" in err
    assert err.count("\n") == 1
    assert not list(folder.iterdir())


def test_a_read_only_folder_is_named_before_any_work(here, disk):
    folder = disk("size=1m,ro")
    for words in (["prune", "cli_nets:net", "--sparsity", 0.5], ["report", "cli_nets:net", "cli_nets:net"], ["demo"]):
        err = run(*words, "-o", folder / "out.html", code=1)
        assert err == f"secateur: {folder}: the folder is read-only, so {folder / 'out.html'} cannot be written\n"


def test_devices_and_links_are_written_to_and_not_replaced(here):
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    run("recipes show magnitude-80 -o pipe")
    assert b"sparsity: 0.8" in os.read(reader, 4096)
    os.close(reader)
    assert Path("pipe").is_fifo()
    Path("link.yaml").symlink_to("real.yaml")
    run("recipes show magnitude-80 -o link.yaml")
    assert Path("link.yaml").is_symlink()
    assert "sparsity: 0.8" in Path("real.yaml").read_text()


def test_reasons_name_options_and_not_arguments(here):
    out = run("prune cli_nets:net --sparsity 0.5 --include 4.weight --set types=[Conv2d] --dry-run")
    assert "4.weight" in out
    from secateur.cli.commands import _options_by_name
    from secateur.cli.running import with_options

    text = with_options(
        "BatchNorm2d is not among the types; pass types= or name it in include=", _options_by_name(), values=False
    )
    assert text == "BatchNorm2d is not among the types; pass --set types or name it in --include"


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "permission denied")])
def test_errors_of_the_system_name_the_file(number, words):
    from secateur.cli.running import one_line

    assert one_line(OSError(number, os.strerror(number), "some/file")) == f"some/file: {words}"
    assert one_line(OSError(number, os.strerror(number), "some/file.secateur-0813c5ac.tmp")) == f"some/file: {words}"
