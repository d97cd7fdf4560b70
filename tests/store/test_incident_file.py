"""Incident files: what leaves the machine, and what opening a foreign one may do."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sqlite3
import tarfile
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.presentation.run_view import note_lines
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store import incident_file
from ltui.training.store.history_reader import RunStore
from ltui.training.store.incident_file import open_incident
from ltui.training.store.past.reader import PastReader
from ltui.training.store.past.snapshots import document_of, past_folder
from ltui.training.store.past.writer import PastWriter
from ltui.training.store.redaction import Redactor, is_secret_name, secret_digests
from ltui.training.store.run_directory import RunDir
from tests.app.frames import frame
from tests.runs.fuzz import fuzz_incident
from tests.runs.hostile_runs import full_run, output_of

PLANTED = 'plant"ed/värde-77'
OTHER = "hunter2-in-the-log"


@pytest.fixture
def run_dir(private_home: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has secrets in each kind of file."""
    run_dir = full_run(private_home, "hang-0001")
    (run_dir.path / "history.json").unlink()
    start = {"env": {"WANDB_API_KEY": PLANTED}}
    (run_dir.path / "engine/1.start.json").write_text(json.dumps(start))
    log = f"key {PLANTED}\nlogin --password {OTHER}\n{private_home}/data\n{'x' * 300_000}\n"
    (run_dir.path / "logs/1/rank-00000.log").write_text(log + f"https://me:{OTHER}@host\n")
    (run_dir.path / "logs/1/engine.log").write_text(f'{{"token": "{OTHER}"}}\n{PLANTED}')
    (run_dir.path / "evidence/1/stacks-7.txt").write_text(f"File {private_home}/train.py {PLANTED}")
    (run_dir.path / "logs/1/linked.log").symlink_to("/etc/hostname")
    (run_dir.path / "code/1.json").write_text(json.dumps({"command": ["--api-key", OTHER]}))
    with closing(sqlite3.connect(run_dir.db_path)) as db, db:
        document = json.loads(db.execute("SELECT document FROM snapshot").fetchone()[0])
        document |= {"detail": PLANTED, "run_dir": str(run_dir.path)}
        db.execute("UPDATE snapshot SET document = ?", (json.dumps(document),))
        db.execute("UPDATE events SET text = ?, data = ?", (PLANTED, json.dumps({"m": PLANTED})))
        db.execute(
            "INSERT INTO samples (attempt, rank, name_id, seq, step, t, value) "
            "VALUES (1, 0, 1, 3, 3, 9000.0, 0.3)"
        )
    monkeypatch.setenv("DB_PASSWORD", OTHER)
    return run_dir


def written(run_dir: RunDir, *words: str) -> Path:
    """Write the incident file of a run whose last verdict began at 1 s."""
    path = run_dir.home / "hang.ltui"
    code, text = output_of(("incident", run_dir.id, "-o", str(path), "--yes", *words))
    assert code == 0, text
    return path


def test_no_secret_and_no_folder_leaves(run_dir: RunDir) -> None:
    path = written(run_dir)
    assert path.stat().st_mode & 0o777 == 0o600
    packed = gzip.decompress(path.read_bytes())
    for secret in (PLANTED, json.dumps(PLANTED)[1:-1], OTHER, str(run_dir.home)):
        assert secret.encode() not in packed
    assert b"[WANDB_API_KEY]" in packed
    with tarfile.open(path) as archive:
        names = archive.getnames()
        sizes = {member.name: member.size for member in archive}
    assert names[0] == "incident.json"
    assert names[-1] == "run.db"
    assert not [name for name in names if re.search("engine/|checkpoints|linked", name)]
    assert sizes["logs/1/rank-00000.log"] < 300_000
    # The original is as it was.
    assert PLANTED in (run_dir.path / "logs/1/engine.log").read_text()


def test_the_record_of_the_minutes_is_in_it_without_secrets(
    run_dir: RunDir, tmp_path: Path
) -> None:
    shutil.rmtree(past_folder(run_dir))
    log = run_dir.path / "logs/1/engine.log"
    lines = [f"line {number} {PLANTED}\n" for number in range(40_000)]
    log.write_text("".join(lines))
    snapshot = resolve_snapshot(run_dir)
    writer = PastWriter(past_folder(run_dir))
    moments = {0.5: 100, 1.5: 39_000, 2.5: 39_500, 500.0: 39_999}
    for at, count in moments.items():
        # The line after these was not complete.
        size = len("".join(lines[: count + 1]).encode()) - 1
        shown = replace(snapshot, taken_at=at, detail=f"{PLANTED} at {at}")
        writer.append(at, document_of(shown, {"engine.log": size, "gone.log": 3}))
    writer.close()
    path = written(run_dir)
    assert PLANTED.encode() not in gzip.decompress(path.read_bytes())
    opened, _, note = open_incident(path, tmp_path / "home")
    assert note is None
    reader = PastReader(past_folder(opened))
    reader.refresh()
    assert reader.bounds() == (0.5, 2.5)  # the last one is later than these minutes
    packed = (opened.path / "logs/1/engine.log").read_bytes()
    for at, count in list(moments.items())[:3]:
        moment = reader.at(at)
        assert moment is not None
        assert moment.snapshot == replace(
            snapshot,
            taken_at=at,
            detail=f"[WANDB_API_KEY] at {at}",
            run_dir="<ltui>/runs/hang-0001",
        )
        ((_, sizes),) = [pair for pair in moment.log_sizes if pair[0] == at]
        shown_lines = packed[: sizes["engine.log"]].splitlines()
        assert sizes.keys() == {"engine.log"}
        # Of the first hundred lines, nothing is in the end of the log that is kept.
        last = shown_lines[-1:] if count > 100 else []
        assert last == [f"line {count - 1} [WANDB_API_KEY]".encode()][: len(last)]
        assert bool(last) == (count > 100)


def test_what_is_written_is_listed_first(run_dir: RunDir) -> None:
    path = run_dir.home / "hang.ltui"
    _, text = output_of(("incident", run_dir.id, "-o", str(path), "--yes"))
    assert (
        text.index("run.db") < text.index("the value of WANDB_API_KEY") < text.index("is written")
    )
    code, text = output_of(("incident", run_dir.id, "-o", str(path), "--force", "--json"))
    data = json.loads(text)["data"]
    assert (code, data["bytes"]) == (0, path.stat().st_size)
    assert data["replaced"]["the value of WANDB_API_KEY"] > 3


def test_it_opens_with_the_minutes_around_the_moment(run_dir: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "opened", ignore_errors=True)
    opened, incident, note = open_incident(written(run_dir), tmp_path / "opened")
    assert (opened.id, note) == (run_dir.id, None)
    assert incident.about.startswith("verdict:1 at ")
    assert opened.db_path.stat().st_mtime == incident.end  # until then it was copied, says `show`
    with RunStore(opened) as store:
        assert store.curve("val/loss").steps.tolist() == [1, 2]
        assert [verdict.cause for verdict in store.verdicts()] == ["rank 1 died"]
    snapshot = resolve_snapshot(opened)
    assert (snapshot.state, snapshot.global_step) == (RunState.FAILED, 9)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(incident.made_at))
    assert snapshot.history_note == f"an incident file: minutes of the run, written at {made}"
    assert snapshot.history_note in note_lines(frame(snapshot=snapshot))
    path = written(run_dir, "--force", "--around", "1970-01-01T02:30:00+00:00")
    shutil.rmtree(tmp_path / "opened")
    opened, _, _ = open_incident(path, tmp_path / "opened")
    with RunStore(opened) as store:
        assert store.curve("val/loss").steps.tolist() == [3]


def test_a_live_run_is_as_it_was_and_nothing_is_started(run_dir: RunDir, tmp_path: Path) -> None:
    with closing(sqlite3.connect(run_dir.db_path)) as db, db:
        document = json.loads(db.execute("SELECT document FROM snapshot").fetchone()[0])
        document |= {"state": "running", "ended_at": None}
    path = written(run_dir)
    opened, _, _ = open_incident(path, tmp_path / "opened")
    with closing(sqlite3.connect(opened.db_path)) as db, db:
        db.execute("UPDATE snapshot SET document = ?", (json.dumps(document),))
    snapshot = resolve_snapshot(opened)
    assert snapshot.state is RunState.RUNNING
    assert "(incident file)" in (snapshot.detail or "")


def test_a_cut_file_with_a_masked_option_opens(run_dir: RunDir, tmp_path: Path) -> None:
    command = ("train", "--token", OTHER, "--api_key", "a, b", f"--password={OTHER}")
    run_dir.write_spec(run_dir.read_spec().with_changes(command=command, config=None, preset=None))
    path = written(run_dir)
    with tarfile.open(path) as whole, tarfile.open(tmp_path / "cut", "w:gz") as cut:
        for member in whole.getmembers()[:2]:
            cut.addfile(member, whole.extractfile(member))
    data = gzip.decompress((tmp_path / "cut").read_bytes()).rstrip(b"\0")
    path.write_bytes(gzip.compress(data + b"\0" * (-len(data) % 512)))
    code, text = output_of(("open", str(path), "--plain"))
    assert (code, "is damaged or was cut after 2" in text) == (0, True), text
    opened, _, _ = open_incident(path, tmp_path / "opened")
    words = "train", "--token", "[secret]", "--api_key", "[secret]", "--password=[secret]"
    assert opened.read_spec().command == words


def test_a_cut_file_opens_as_far_as_it_goes(run_dir: RunDir, tmp_path: Path) -> None:
    path = written(run_dir)
    data = path.read_bytes()
    seen = set()
    for part in range(1, 20):
        path.write_bytes(data[: len(data) * part // 20])
        try:
            opened, _, note = open_incident(path, tmp_path / str(part))
        except ProblemError:
            seen.add("nothing")
            continue
        assert "is damaged or was cut after" in (note or "")
        assert resolve_snapshot(opened).id == run_dir.id
        seen.add("history" if opened.db_path.exists() else "files")
    assert "files" in seen


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("incident.json", b'{"schema": 2}', "a newer ltui has written it"),
        ("incident.json", b'{"schema": 1, "run": "../x"}', "it names no run"),
        ("incident.json", b"[]", "it is no incident file"),
        ("../../x", b"x", "it is no incident file"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with tarfile.open(tmp_path / "bad.ltui", "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "x", name)
    with pytest.raises(ProblemError, match=words):
        open_incident(tmp_path / "bad.ltui", tmp_path / "home")


def test_a_file_that_would_fill_the_disk_is_refused(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(run_dir)
    monkeypatch.setattr(incident_file, "MOST_BYTES", 1 << 14)
    with pytest.raises(ProblemError, match="it holds more than 0 MB"):
        open_incident(path, tmp_path / "home")


def test_no_link_leads_out_and_no_name_does(tmp_path: Path, run_dir: RunDir) -> None:
    whole = written(run_dir)
    (tmp_path / "x").write_text("x")
    os.symlink("/etc/hostname", tmp_path / "link")
    for source, name in (("link", "logs/1/a.log"), ("x", "../../../x"), ("x", "engine/1.json")):
        with tarfile.open(tmp_path / "bad.ltui", "w:gz", format=tarfile.USTAR_FORMAT) as archive:
            with tarfile.open(whole) as good:
                for member in good.getmembers()[:2]:
                    archive.addfile(member, good.extractfile(member))
            archive.add(tmp_path / source, name)
        home = tmp_path / f"home-{source}-{len(name)}"
        opened, _, note = open_incident(tmp_path / "bad.ltui", home)
        assert "is no file of a run" in (note or "")
        assert sorted(path.name for path in opened.path.iterdir()) == ["history.json", "spec.yaml"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("incident", "hang-0001", "--around", "verdict:2"), "verdict:1 at"),
        (("incident", "hang-0001", "--around", "noon"), "Give verdict:N, or a time"),
        (("incident", "nobody"), "there is no such run"),
        (("open", "gone.ltui"), "it cannot be read"),
        (("open", "/dev/zero"), "it cannot be read"),
        (("open", "/dev/zero", "--to", "made"), "it cannot be read"),
        (("open", "/dev/zero", "--to", "/proc/made"), "the folder cannot be written"),
        (("incident", "hang-0001", "--yes", "-o", "/dev/full"), "no regular file"),
        (("incident", "hang-0001", "--yes", "-o", "pipe"), "no regular file"),
    ],
)
def test_bad_input(
    run_dir: RunDir, words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.home)
    os.mkfifo("pipe")
    code, text = output_of(words)
    assert code == 2
    assert sentence in text
    assert not list(Path().glob("hang-0001.ltui"))
    assert not Path("made").exists()


def test_damaged_files_neither_crash_nor_reach_the_terminal(tmp_path: Path) -> None:
    assert fuzz_incident(tmp_path, first=0, count=40, seed=7) == []


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("max_tokens: 512, tokenizer: gpt2_large", None),
        ("the token embedding layer; key_padding_mask=abcdefgh", None),
        ("password = none", None),
        ("api_key: abcdefgh1", "api_key: [secret]"),
        ("- --token\n- abcdefgh", "- --token\n- [secret]"),
        ('["--wandb-token", "abcdefgh"]', '["--wandb-token", "[secret]"]'),
        ("Bearer abc.def.ghijk", "Bearer [key]"),
        ("hf_ABCDEFGHIJKLMNOP", "[key]"),
        ("/home/alice/x", "/home/user/x"),
        ("/data/set/x", "<data>/x"),
        ("/data/settle/x /rootfs", None),
        ('File "/root/x.py"', 'File "~/x.py"'),
        ("--api_key abcdefgh --model.token=ab,cd 3", "--api_key [secret] --model.token=[secret] 3"),
        ("+trainer.apiKey=abc", "+trainer.apiKey=[secret]"),
        ("password='it is, a b' x", "password='[secret]' x"),
        ('{"db_password": "a, \\" b", "n": 1}', '{"db_password": "[secret]", "n": 1}'),
        (r'"{\"token\": \"a, b\", \"n\": 1}"', r'"{\"token\": \"[secret]\", \"n\": 1}"'),
        ("['--token', 'a, b', '3']", "['--token', '[secret]', '3']"),
        ("  password: correct horse, battery\nn: 1", "  password: [secret]\nn: 1"),
        ('x token="cut of', 'x token="[secret]'),
        ("password: 12345678", "password: [secret]"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: [secret]"),
        ("https://user:p@ss/word@host/x", "https://[user]@host/x"),
        (
            "postgres://u:p@h/db https://abcdef@h:80/x@y",
            "postgres://[user]@h/db https://[user]@h:80/x@y",
        ),
        ("http://localhost:6006/a@b", None),
        ("bearer abc.def.ghijk; sk-abc123DEF; ghp_0a1b2c3d4", "bearer [key]; [key]; [key]"),
        ("call hf_hub_download", None),
        ("c3Q=\nZW5k\n-----END RSA PRIVATE KEY-----\nn: 1", "[key]\nn: 1"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nc3Q=", "[key]"),
        (
            "x?X-Amz-Signature=ab12&y signature=cd34",
            "x?X-Amz-Signature=[secret] signature=[secret]",
        ),
        ("https://hooks.slack.com/services/T01234567/B0/abCD12345678", "https://[key]"),
        ("dckr_pat_abCD1234-x", "[key]"),
        ("\x1b[1mpassword\x1b[0m=\x1b[32mhunter2\x1b[0m x", "password=[secret] x"),
        ("password:\n  correct horse\nn: 1", "password:\n  [secret]\nn: 1"),
        ("password: |\n  correct\nn: 1", "password: |\n  [secret]\nn: 1"),
        ("secrets:\n  n: 1\ntoken:\nn: 1", None),
        ("login me password hunter2", "login me password [secret]"),
        ("curl -s -u 'me:hunter2' https://h", "curl -s -u 'me:[secret]' https://h"),
        ("curl https://h --user=me:hunter2", "curl https://h --user=me:[secret]"),
        ("curl -u me https://h:80/x", None),
    ],
)
def test_forms_of_secrets(text: str, redacted: str | None) -> None:
    assert Redactor({}, {"/data/set/": "<data>"}).text(text) == (redacted or text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        "://",
        "://a:",
        "token=",
        "a_",
        "--token ",
        "eyJ",
        "hf_",
        "-----END ",
        "token:\n ",
        "x\x1b[",
        "curl -u ",
    ],
)
def test_no_text_keeps_the_redactor_busy(part: str) -> None:
    """A pattern whose time grows with the square of the length would take minutes."""
    assert Redactor({}, {}).text(part * 90_000)


def test_each_form_and_line_of_a_secret_value_is_found() -> None:
    value = "first line/1\n{\n-----BEGIN X-----\n"
    for text in ("first+line%2F1", "first%20line/1", "a first line/1"):
        stored = json.loads(json.dumps(secret_digests({"A_TOKEN": value})))
        for redactor in Redactor({"A_TOKEN": value}, {}), Redactor({}, {}, [stored]):
            assert redactor.text(text) in ("[A_TOKEN]", "a [A_TOKEN]")
            assert redactor.text("{ -----BEGIN X-----") == "{ -----BEGIN X-----"


def test_documents_are_redacted_as_documents() -> None:
    lines = ["c3Q=", "-----END PRIVATE KEY-----", "ok", "-----BEGIN PRIVATE KEY-----", "c3Q="]
    assert Redactor({}, {}).document({"log_tail": lines}) == {"log_tail": ["[key]", "ok", "[key]"]}
    redactor = Redactor({}, {})
    command = ["python", "--api_key", "a, b", "--model.token=x y", "--lr", "1", "-n", "abcdef"]
    document = {"command": command, "auth": {"user": "me", "n": [7, "x"]}, "pad_token": 3}
    assert redactor.document(document) == {
        "command": [
            *("python", "--api_key", "[secret]", "--model.token=[secret]"),
            *("--lr", "1", "-n", "abcdef"),
        ],
        "auth": {"user": "[secret]", "n": [7, "[secret]"]},
        "pad_token": 3,
    }
    assert redactor.replaced == {"values beside the names of secrets": 4}


def test_values_of_variables_that_are_set_no_more_are_found_by_their_digests() -> None:
    variables = {
        "A_TOKEN": PLANTED,
        "B_KEY": "q7-x",
        "C_KEY": "a.b",
        "PATH": "/usr/bin",
        "D_KEY": "",
    }
    stored = json.loads(json.dumps(secret_digests(variables)))
    assert {"q7-x", "plant"}.isdisjoint(json.dumps(stored).split('"'))
    redactor = Redactor({}, {}, [stored, {"key": "x"}, {"key": "00", "names": {"A": [[[1], 2]]}}])
    text = f"log {json.dumps(PLANTED)} q7-x. /usr/bin a.b plant ed, plant ..... ed värde-77"
    redacted = 'log "[A_TOKEN]" [B_KEY]. /usr/bin a.b plant ed, plant ..... ed värde-77'
    assert redactor.text(text) == redacted
    assert redactor.replaced == {"the value of A_TOKEN": 1, "the value of B_KEY": 1}


def test_names_of_secrets() -> None:
    assert not any(map(is_secret_name, ("PWD", "OLDPWD", "monitor_key", "key", "forward_pass")))
    assert all(map(is_secret_name, ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "X_PASS")))
    assert not any(map(is_secret_name, ("PATH", "TOKENIZERS_PARALLELISM", "MONKEY", "COMPASS")))
