"""The launcher's configuration file: what accelerate writes works or is refused by name, and nothing else happens."""

import dataclasses
import io
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.accelerator.commands.accelerate_cli import main
from common.accelerator.commands.config import (
    ClusterConfig,
    ConfigError,
    UnsupportedConfig,
    default_config_path,
    load_config_from_file,
)
from common.accelerator.commands.config.config_args import (
    FIXED,
    OUT_OF_SCOPE,
    SETTINGS,
    MissingConfig,
    config_from_dict,
)

LEVEL = Path(__file__).parents[3] / "03_accelerate"


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_shipped_files_mean_what_their_names_say():
    assert load_config_from_file(LEVEL / "two_processes.yaml") == ClusterConfig(
        distributed_type="MULTI_CPU", num_processes=2, use_cpu=True, mixed_precision="no"
    )
    assert load_config_from_file(LEVEL / "multi_gpu_fp16.yaml") == ClusterConfig(
        distributed_type="MULTI_GPU", num_processes=2, mixed_precision="fp16"
    )


def test_multi_gpu_file_is_what_accelerate_config_writes():
    theirs = pytest.importorskip("accelerate.commands.config.config_args")
    # The answers "multi-GPU, one machine, two GPUs, fp16", every other question at its default.
    answers = dict(
        compute_environment="LOCAL_MACHINE", distributed_type="MULTI_GPU", mixed_precision="fp16", use_cpu=False,
        debug=False, num_processes=2, gpu_ids="all", downcast_bf16="no", rdzv_backend="static", same_network=True,
        tpu_env=[],
    )  # fmt: skip
    shipped = LEVEL / "multi_gpu_fp16.yaml"
    assert theirs.load_config_from_file(str(shipped)) == theirs.ClusterConfig(**answers)
    fresh = theirs.ClusterConfig(**answers).to_dict()
    assert {
        key: value for key, value in yaml.safe_load(shipped.read_text()).items() if value not in (None, {})
    } == fresh


def test_every_key_of_accelerate_is_known():
    theirs = pytest.importorskip("accelerate.commands.config.config_args")
    names = {field.name for field in dataclasses.fields(theirs.ClusterConfig)}
    assert names == {*SETTINGS, *FIXED, *OUT_OF_SCOPE}


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
def test_a_file_of_accelerates_means_the_same_here(tmp_path, mixed_precision):
    theirs = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "default_config.yaml"
    config = theirs.ClusterConfig(
        "LOCAL_MACHINE", "MULTI_CPU", mixed_precision, True, True, 4, 1, 2, None, "10.0.0.1", 29501, "c10d", False
    )
    config.to_yaml_file(str(path))
    ours = load_config_from_file(path)
    path.write_text(ours.to_yaml())
    again = theirs.load_config_from_file(str(path))
    for field in dataclasses.fields(ours):
        if field.name != "gpu_ids":  # there None means "all"
            value = getattr(config, field.name)
            assert getattr(ours, field.name) == getattr(again, field.name) == value, field.name


@pytest.mark.parametrize("key", OUT_OF_SCOPE)
def test_out_of_scope_is_refused_by_name_and_passes_when_empty(key):
    for nothing in (None, {}, [], "", False, "no"):
        assert config_from_dict({key: nothing}) == ClusterConfig()
    for request in ({"zero_stage": 2}, ["x"], "yes", True):
        with pytest.raises(UnsupportedConfig, match=key) as error:
            config_from_dict({key: request})
        assert isinstance(error.value, NotImplementedError)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_proceses": 2}, "unknown key 'num_proceses'; did you mean 'num_processes'?"),
        ({"num_processes": "two"}, "num_processes must be a whole number, not 'two'"),
        ({"num_processes": True}, "num_processes must be a whole number"),
        ({"num_processes": 0}, "num_processes must be at least 1"),
        ({"num_processes": 3, "num_machines": 2, "main_process_ip": "h", "main_process_port": 1}, "does not divide"),
        ({"num_processes": 2, "num_machines": 2}, "need main_process_ip and main_process_port"),
        ({"machine_rank": 1}, "machine_rank 1: 1 machines are numbered from 0 to 0"),
        ({"main_process_port": 70000}, "between 0 and 65535"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend 'etcd' is not supported; it can be static, c10d"),
        ({"mixed_precision": "fp8"}, "mixed_precision 'fp8' is not supported; it can be no, fp16, bf16"),
        ({"distributed_type": "FSDP"}, "distributed_type 'FSDP' is not supported"),
        ({"distributed_type": "NO", "num_processes": 2}, "NO is one process, but num_processes is 2"),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "use_cpu contradicts distributed_type MULTI_GPU"),
        ({"use_cpu": True, "gpu_ids": "0"}, "are about GPUs, this is for the CPU"),
        ({"use_cpu": "yes"}, "use_cpu must be true or false, not 'yes'"),
        ({"gpu_ids": "0,0"}, "gpu_ids must be 'all' or distinct device numbers"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment 'AMAZON_SAGEMAKER' is not supported"),
        ({"main_training_function": "train"}, "main_training_function 'train' is not supported; it can be main"),
    ],
)
def test_what_is_wrong_is_said(settings, message):
    with pytest.raises(ConfigError) as error:
        config_from_dict(settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_yaml_reads_an_unquoted_no_as_false(tmp_path):
    assert load_config_from_file(written(tmp_path, "mixed_precision: no\ndowncast_bf16: no\n")).mixed_precision == "no"


def test_default_file_lies_where_accelerate_keeps_it(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert default_config_path() == Path("/nowhere/.cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_config_path() == Path("/cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_config_path() == tmp_path / "accelerate" / "default_config.yaml"
    assert load_config_from_file() == ClusterConfig()
    default_config_path().parent.mkdir()
    default_config_path().write_text("num_processes: 3")
    assert load_config_from_file().num_processes == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds None, not a mapping"),
        ("[1, 2]", "holds [1, 2], not a mapping"),
        ("a: [", "not valid YAML in line 1"),
        ("debug: !!bool perhaps", "not valid YAML: KeyError"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML in line 1"),
        ("[" * 1500, "not valid YAML"),
        ("debug: true\n\ndebug: false", "in line 3: the key 'debug' stands there twice, the first time in line 1"),
        ('{"debug": true, "debug": false}', "in line 1: the key 'debug' stands there twice"),
        ("fsdp_config:\n  a: 1\n  a: 2", "in line 3: the key 'a' stands there twice, the first time in line 2"),
    ],
)
def test_unusable_files_are_refused_with_their_name(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config_from_file(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_unreadable_and_binary_files(tmp_path):
    with pytest.raises(MissingConfig, match=r"no such file; `python -m common.accelerator config` writes one"):
        load_config_from_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config_from_file(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config_from_file(tmp_path / "binary.yaml")


def test_aliases_that_multiply_do_not_fill_the_memory(tmp_path):
    items = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    items += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]  # 10^12 leaves if written out
    for key in ("num_processes", "mixed_precision", "commands", "gpu_ids", "surprise"):
        with pytest.raises(ConfigError, match=key):
            load_config_from_file(written(tmp_path, f"{key}: [{', '.join(items)}]"))


names = st.sampled_from([*SETTINGS, *FIXED, *OUT_OF_SCOPE])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.dictionaries(names | st.text(max_size=6) | st.integers() | st.none(), values, max_size=6))
def test_fuzz_any_mapping_is_a_launchable_config_or_a_config_error(mapping):
    try:
        config = config_from_dict(mapping)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        config.check()
        assert config_from_dict(yaml.safe_load(config.to_yaml())) == config


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_fuzz_mutated_files_give_only_config_errors(tmp_path_factory, data):
    raw = bytearray((LEVEL / "multi_gpu_fp16.yaml").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw)))
        piece = data.draw(st.sampled_from([b"", b"\n", b": ", b"{", b"&a ", b"*a", b"!!int ", b"!!timestamp x", b"- "])
                          | st.binary(max_size=3))  # fmt: skip
        raw[at : at + data.draw(st.integers(0, 4))] = piece
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(raw)
    try:
        load_config_from_file(path).check()
    except ConfigError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def test_config_default_writes_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert str(default_config_path()) in capsys.readouterr().out
    assert load_config_from_file().mixed_precision == "bf16"
    assert main(["config", "default"]) == 1
    assert "left as it is" in capsys.readouterr().err
    assert load_config_from_file().mixed_precision == "bf16"


def test_config_asks_until_the_answers_fit(tmp_path, capsys, monkeypatch):
    path = tmp_path / "deep" / "file.yaml"
    answers = iter(["abacus", "yes", "2", "1", "10.0.0.1", "x", "29501", "c10d", "4", "", "bf16"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["config", "--config_file", str(path)]) == 0
    assert load_config_from_file(path) == ClusterConfig(
        distributed_type="MULTI_CPU", num_processes=4, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1",
        main_process_port=29501, rdzv_backend="c10d", mixed_precision="bf16", use_cpu=True,
    )  # fmt: skip
    assert "the answer must be true or false, not 'abacus'" in capsys.readouterr().out


def test_config_without_answers_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert main(["config", "--config_file", str(tmp_path / "file.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "config default" in error
    assert not (tmp_path / "file.yaml").exists()


def test_config_into_a_place_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["config", "default", "--config_file", str(tmp_path / "file" / "x.yaml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_env_reports_a_broken_configuration(tmp_path, capsys, monkeypatch):
    path = written(tmp_path, "num_proceses: 2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["env", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert "PyTorch" in out and "ACCELERATE_MIXED_PRECISION=bf16" in out
    assert "did you mean 'num_processes'?" in out
