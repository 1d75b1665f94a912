"""The texts of tokens: pieces of characters, spaces, special tokens, and missing tokenizers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from viewer_process import rollout, run, segment, write

from ngym.errors import UsageError
from ngym.view.runs import RolloutRun
from ngym.view.tokens import check, row_tokens, tokenizer_file

TEXT = "Hi, 東京 😀!\n\tdone"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows single bytes only, so that each character beyond ASCII is in pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<|end|>"]))
    path = tmp_path_factory.mktemp("policy") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def line_with(ids: list[int]) -> bytes:
    row = rollout(0, 0, 1.0)
    segment_row = {
        "token_ids": ids,
        "mask": [[0, len(ids)]],
        "logprobs": [-1.0] * len(ids),
        "policy_version": [[0, len(ids), 1]],
    }
    row["ng"]["segments"] = [segment_row]
    return orjson.dumps(row)


def test_a_character_in_pieces_is_in_the_piece_that_completes_it(byte_level: Path) -> None:
    ids = Tokenizer.from_file(str(byte_level)).encode(TEXT).ids
    tokens = row_tokens(line_with([*ids, 0]), 0.25, byte_level)
    (found,) = tokens["segments"]
    texts = [token["text"] for token in found["tokens"]]
    assert "".join(texts) == TEXT + "<|end|>"
    assert texts[:4] == ["H", "i", ",", " "]
    place = len("Hi, ")
    assert texts[place : place + 3] == ["", "", "東"]
    assert [token["bytes"] for token in found["tokens"][place : place + 3]] == ["e6", "9d", "b1"]
    assert "bytes" not in found["tokens"][0]
    assert (found["advantage"], tokens["note"]) == (0.25, None)


def test_bytes_that_make_no_character_are_replaced_and_named(byte_level: Path) -> None:
    ids = Tokenizer.from_file(str(byte_level)).encode("東").ids
    (found,) = row_tokens(line_with([ids[0], ids[0], ids[1]]), None, byte_level)["segments"]
    assert [token["text"] for token in found["tokens"]] == ["", "\ufffd", "\ufffd"]
    assert [token["bytes"] for token in found["tokens"]] == ["e6", "e6", "9d"]


def test_sentencepiece_pieces_have_their_spaces_and_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "\u2581It": 1, "\u2581is": 2, "<0xE6>": 3, "<0x9D>": 4, "<0xB1>": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (found,) = row_tokens(line_with([1, 2, 3, 4, 5, 99]), None, tmp_path / "tokenizer.json")["segments"]
    assert [token["text"] for token in found["tokens"]] == [" It", " is", "", "", "東", "<99?>"]


def test_without_a_tokenizer_the_ids_are_shown_and_the_note_says_what_to_name(tmp_path: Path) -> None:
    tokens = row_tokens(orjson.dumps(rollout()), None, None)
    assert [token["id"] for token in tokens["segments"][0]["tokens"]] == segment()["token_ids"]
    assert {token["text"] for token in tokens["segments"][0]["tokens"]} == {None}
    assert "--tokenizer FOLDER" in tokens["note"]
    bare = rollout()
    bare["ng"]["segments"] = []
    assert "no token ids" in row_tokens(orjson.dumps(bare), None, None)["note"]


@pytest.mark.parametrize(
    "damage",
    [
        (b"-0.25", b"NaN"),
        (b'"token_ids"', b'"ids"'),
        (b'"mask":[[3,5]]', b'"mask":[3]'),
        (b"[5,6,7,8,9]", b'[-5,"6",7.5,null,8]'),
        (b'"segments":[{', b'"segments":[7,{'),
    ],
)
def test_segments_that_are_invalid_are_reported(byte_level: Path, damage: tuple[bytes, bytes]) -> None:
    line = orjson.dumps(rollout()).replace(*damage)
    assert line != orjson.dumps(rollout())
    tokens = row_tokens(line, None, byte_level)
    assert tokens["segments"] == []
    assert "tokens of this row cannot be shown" in tokens["note"] or "have an unknown format" in tokens["note"]


def test_the_advantage_of_a_row_is_that_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "out.jsonl", [rollout(0, 0, 1.0), rollout(0, 1, 0.0), rollout(0, 2, reward="high")])
    rollout_run = RolloutRun("r1", "out", path, None)
    rollout_run.index.catch_up()
    assert [rollout_run.tokens(seq)["segments"][0]["advantage"] for seq in range(3)] == [0.5, -0.5, None]
    rollout_run.index.close()


def test_the_tokenizer_is_the_one_that_was_named_or_lies_beside_or_the_run_s_record_names(
    byte_level: Path, tmp_path: Path
) -> None:
    output = write(tmp_path / "out.jsonl", [rollout()])
    assert tokenizer_file(None, output) is None
    record = {"config": {"services": {"policy": {"kind": "model", "model": str(byte_level.parent)}}}}
    (tmp_path / "out_run.json").write_text(json.dumps(record))
    assert tokenizer_file(None, output) == byte_level
    record["config"]["services"]["policy"]["model"] = os.path.relpath(byte_level.parent, tmp_path)
    (tmp_path / "out_run.json").write_text(json.dumps(record))
    found = tokenizer_file(None, output)
    assert found is not None and found.samefile(byte_level)  # named as in a config beside the rollouts
    (tmp_path / "policy").mkdir()
    file = tmp_path / "policy" / "tokenizer.json"
    file.write_bytes(byte_level.read_bytes())
    assert tokenizer_file(None, output) == file
    assert tokenizer_file(byte_level.parent, output) == tokenizer_file(byte_level, output) == byte_level


@pytest.mark.process
def test_what_is_not_a_tokenizer_is_refused_when_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", [rollout()])
    found = run(tmp_path / "out.jsonl", "--tokenizer", tmp_path, cache=tmp_path / "cache")
    assert (found.returncode, "there is no tokenizer.json" in found.stderr) == (2, True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="no tokenizer"):
        check(tmp_path)
