"""From settings to a ready engine, and every start-up fault as an error that names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_core.errors import CheckpointError
from server import loader
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.request import RequestParams
from tests.server.engines import GREEDY, check_idle, run_one
from tests.tiny import EOS_ID, edit_json, edit_weights, tiny_draft_folder, tiny_target_folder, write_json

TARGET_CONFIG = "target/config.json"
DRAFT_CONFIG = "draft/config.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `target` and a `draft` for it."""
    root = tmp_path_factory.mktemp("models")
    return tiny_draft_folder(root, tiny_target_folder(root), draft_len=5).parent


def load(root: Path, **settings: Any) -> Engine:
    fields: dict[str, Any] = {
        "ckpt": str(root / "draft"),
        "target": str(root / "target"),
        "seed": 0,
        "verify": "full",
        **settings,
    }
    return load_engine(ServerConfig(**fields))


def test_what_is_loaded_works_and_says_what_it_is(folders: Path) -> None:
    engine = load(folders, max_model_len=64, page_size=16, max_num_seqs=3)
    assert (engine.max_model_len, engine.max_num_seqs, engine.draft_len) == (64, 3, 5)
    assert engine.vocab_size == 258
    assert engine.eos_token_ids == {EOS_ID}
    params = RequestParams(GREEDY, max_tokens=20, ignore_eos=True)
    drafted = run_one(engine, [5, 6, 7], params)
    plain = run_one(engine, [5, 6, 7], RequestParams(GREEDY, max_tokens=20, ignore_eos=True, speculative=False))
    assert drafted.ids == plain.ids
    assert drafted.last.speculation.rounds > 0
    told = {key.lower(): value for key, value in engine.info.items()}
    assert told["target"] == "target (qwen3, 4 layers)"
    assert told["head"] == "vanilla, with a confidence head"
    assert (told["draft_len"], told["dtype"], told["device"]) == ("5", "float32", "cpu")
    assert told["kv capacity"].startswith("192 tokens")
    assert str(folders / "draft") in told["draft"]


@pytest.mark.parametrize("draft_len", [1, 3, 5])
def test_a_shorter_block_may_be_asked_for(folders: Path, draft_len: int) -> None:
    engine = load(folders, max_model_len=64, draft_len=draft_len)
    assert engine.draft_len == draft_len
    spent = run_one(engine, [5], RequestParams(GREEDY, max_tokens=12, ignore_eos=True)).last.speculation
    assert 0 < spent.rounds <= spent.drafted <= spent.rounds * draft_len


def test_the_context_is_the_models_unless_asked_for_less(folders: Path, tmp_path: Path) -> None:
    assert load(folders).max_model_len == 256
    root = copy(folders, tmp_path)
    edit_json(root / DRAFT_CONFIG, max_position_embeddings=100)
    assert load(root).max_model_len == 100


def test_little_memory_shortens_the_context_when_none_was_asked_for(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case S4."""
    # A page of 64 positions: keys and values, 4 target and 2 draft layers, 2 heads of 16 float32.
    size = 2 * (4 + 2) * 64 * 2 * 16 * 4
    monkeypatch.setattr(loader, "_free_memory", lambda _: 10 * size)
    engine = load(folders, kv_memory_fraction=0.55)
    assert (engine.max_model_len, engine.memory.capacity) == (256, 5 * 64)
    engine = load(folders, kv_memory_fraction=0.25)
    assert (engine.max_model_len, engine.memory.capacity) == (2 * 64, 2 * 64)


def test_an_equal_head_is_held_once(folders: Path, tmp_path: Path) -> None:
    engine = load(folders)
    assert engine.drafter is not None
    assert engine.drafter.model.lm_head is engine.target.lm_head
    root = copy(folders, tmp_path)
    edit_weights(root / "draft/model.safetensors", **{"lm_head.weight": torch.randn(259, 32)})
    other = load(root)
    assert other.drafter is not None
    assert other.drafter.model.lm_head is not other.target.lm_head


def test_a_draft_may_borrow_embedding_and_head(folders: Path, tmp_path: Path) -> None:
    root = copy(folders, tmp_path, draft=False)
    tiny_draft_folder(root, root / "target", draft_len=5, borrow=True)
    params = RequestParams(GREEDY, max_tokens=20, ignore_eos=True)
    own, borrowed = (run_one(load(where), [5, 6], params) for where in (folders, root))
    assert own.ids == borrowed.ids
    assert own.last.speculation == borrowed.last.speculation


def test_the_target_that_the_draft_names_is_taken(folders: Path, tmp_path: Path) -> None:
    root = copy(folders, tmp_path)
    edit_json(root / DRAFT_CONFIG, _name_or_path=str(root / "target"))
    assert load(root, target=None).vocab_size == 258
    edit_json(root / DRAFT_CONFIG, _name_or_path=None)
    with pytest.raises(CheckpointError, match="--target"):
        load(root, target=None)


def test_ends_of_text_are_those_of_all_files(folders: Path, tmp_path: Path) -> None:
    """Case E3."""
    root = copy(folders, tmp_path)
    edit_json(root / "target/config.json", eos_token_id=[10, 11])
    edit_json(root / "target/generation_config.json", eos_token_id=12)
    edit_json(root / "target/tokenizer_config.json", eos_token="<|end|>")
    engine = load(root)
    assert engine.eos_token_ids == {1, 10, 11, 12}
    plain = run_one(engine, [5, 6], RequestParams(GREEDY, max_tokens=40, ignore_eos=True)).ids
    edit_json(root / "target/generation_config.json", eos_token_id=[plain[6]])
    result = run_one(load(root), [5, 6], RequestParams(GREEDY, max_tokens=40))
    assert result.last.finish_reason == "stop"
    assert len(result.ids) <= 7


def test_ids_that_the_tokenizer_does_not_know_are_never_emitted(tmp_path: Path) -> None:
    """Case R2."""
    target = tiny_target_folder(tmp_path, tokenizer_size=60)
    head = torch.randn(259, 32)
    head[60:] *= 50  # nearly every row would choose padding
    edit_weights(target / "model.safetensors", **{"lm_head.weight": head})
    tiny_draft_folder(tmp_path, target, draft_len=5, borrow=True)
    engine = load(tmp_path)
    assert engine.vocab_size == 60
    params = RequestParams(GREEDY, max_tokens=40, ignore_eos=True, logprobs=20)
    result = run_one(engine, [5, 6], params)
    assert max(result.ids) < 60
    assert max(token for entry in result.logprobs for token, _ in entry.top) < 60
    assert result.ids == run_one(engine, [5, 6], RequestParams(GREEDY, max_tokens=40, ignore_eos=True)).ids


def copy(folders: Path, into: Path, *, draft: bool = True) -> Path:
    shutil.copytree(folders / "target", into / "target")
    if draft:
        shutil.copytree(folders / "draft", into / "draft")
    return into


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Damage, dict[str, Any], list[str]]] = {
    "vocabulary of another size": (
        lambda r: edit_json(r / DRAFT_CONFIG, vocab_size=300),
        {},
        ["vocab_size", "300", "259"],
    ),
    "other number of target layers": (
        lambda r: edit_json(r / DRAFT_CONFIG, num_target_layers=6),
        {},
        ["another target", "num_target_layers is 6", "4"],
    ),
    "same sizes, other model": (
        lambda r: edit_weights(r / "draft/model.safetensors", **{"embed_tokens.weight": torch.randn(259, 32)}),
        {},
        ["another target", "embed_tokens"],
    ),
    "mask outside the vocabulary": (
        lambda r: edit_json(r / DRAFT_CONFIG, mask_token_id=259),
        {},
        ["mask_token_id is 259", "0 to 258", "draft"],
    ),
    "no mask": (lambda r: edit_json(r / DRAFT_CONFIG, mask_token_id=None), {}, ["mask_token_id", "missing"]),
    "head too narrow": (
        lambda r: edit_weights(r / "draft/model.safetensors", **{"confidence_head.proj.weight": torch.zeros(1, 32)}),
        {},
        ["confidence_head.proj.weight", "[1, 32]", "[1, 38]"],
    ),
    "missing tensor": (
        lambda r: edit_weights(r / "draft/model.safetensors", **{"fc.weight": None}),
        {},
        ["missing fc.weight"],
    ),
    "unexpected tensor": (
        lambda r: edit_weights(r / "target/model.safetensors", **{"model.extra": torch.zeros(2)}),
        {},
        ["unexpected extra"],
    ),
    "truncated file": (lambda r: truncate(r / "target/model.safetensors"), {}, ["model.safetensors", "truncated"]),
    "missing shard": (
        lambda r: write_json(
            r / "target/model.safetensors.index.json", {"weight_map": {"model.norm.weight": "gone.safetensors"}}
        ),
        {},
        ["gone.safetensors"],
    ),
    "no tokenizer": (lambda r: (r / "target/tokenizer.json").unlink(), {}, ["tokenizer.json"]),
    "no config": (lambda r: (r / TARGET_CONFIG).unlink(), {}, ["config.json"]),
    "two drafts": (
        lambda r: shutil.copy(r / "target/tokenizer.json", r / "draft"),
        {"target": "draft"},
        ["Qwen3DSparkModel", "LlamaForCausalLM"],
    ),
    "two targets": (lambda r: None, {"ckpt": "target"}, ["Qwen3DSparkModel", "--target"]),
    "no such folder": (lambda r: None, {"ckpt": "nowhere"}, ["nowhere"]),
    "no such device": (lambda r: None, {"device": "toaster"}, ["--device toaster"]),
    "device that is not there": (lambda r: None, {"device": "xpu:7"}, ["--device xpu:7"]),
    "context too long": (lambda r: None, {"max_model_len": 257}, ["--max-model-len is 257", "256"]),
    "block too long": (lambda r: None, {"draft_len": 6}, ["draft_len is 6", "1 to 5"]),
    "no memory": (lambda r: None, {"kv_memory_fraction": 1e-9}, ["KV memory", "--kv-memory-fraction"]),
    "too little memory": (
        lambda r: None,
        {"kv_memory_fraction": 1e-9, "max_model_len": 200},
        ["KV memory", "200", "--max-model-len"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_start_up_fault_says_what_is_wrong(folders: Path, tmp_path: Path, name: str) -> None:
    """Cases R1, R2, R6, R10 and S4."""
    damage, settings, words = DAMAGES[name]
    damage(root := copy(folders, tmp_path))
    settings = {key: str(root / value) if key in ("ckpt", "target") else value for key, value in settings.items()}
    with pytest.raises(CheckpointError) as raised:
        load(root, **settings)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_every_family_loads_and_is_exact(tmp_path: Path) -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        target = tiny_target_folder(tmp_path / family, family)
        tiny_draft_folder(tmp_path / family, target, "rnn", 4)
        engine = load(tmp_path / family)
        drafted, plain = (
            run_one(engine, [9, 8, 7], RequestParams(GREEDY, max_tokens=24, ignore_eos=True, speculative=speculative))
            for speculative in (True, False)
        )
        assert drafted.ids == plain.ids
        check_idle(engine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_served(folders: Path, dtype: str) -> None:
    engine = load(folders, dtype=dtype)
    assert engine.info["dtype"] == dtype
    result = run_one(engine, [5, 6], RequestParams(GREEDY, max_tokens=12, ignore_eos=True, logprobs=0))
    assert len(result.ids) == 12
    assert all(entry.logprob <= 0 for entry in result.logprobs)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert loader._container_memory(tmp_path) > 2**60, "no group"
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert loader._container_memory(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert loader._container_memory(tmp_path) > 2**60, "no limit"
