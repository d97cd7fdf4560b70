"""Which contents and names of files may be secrets, and which are ordinary code."""

from __future__ import annotations

import hashlib

import pytest

from ltui.training.store.secret_files import holds_secret, is_secret

HEX = hashlib.sha1(b"key").hexdigest()
AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"
TOKEN = "ghp_" + "a1B2" * 9
PASSWORD = "hunter" + "2!"


@pytest.mark.parametrize(
    "text",
    [
        TOKEN,
        f"aws_secret_access_key = {AWS}\n",
        f"aws_secret_access_key: '{AWS}'  # mine",
        f'WANDB_API_KEY = "{HEX}"',
        f"export WANDB_API_KEY={HEX}",
        f'os.environ["WANDB_API_KEY"] = "{HEX}"',
        f"os.environ.setdefault('WANDB_API_KEY', '{HEX}')",
        f"machine api.wandb.ai\n  login user\n  password {HEX}\n",
        f"https://bob:{PASSWORD}@example.org/x.git",
        f"redis://:{PASSWORD}@10.0.0.1",
        "-----BEGIN OPENSSH PRIVATE " + "KEY-----",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_secrets(text: str, encoding: str) -> None:
    assert holds_secret(f"\n{text}\n".encode(encoding))


@pytest.mark.parametrize(
    "text",
    [
        "password = getpass()",
        "token = tokenizer(text, return_tensors='pt', max_length=1024, padding='max_length')",
        "key = 'model/encoder/layer/11/attention/self/query/weight'",
        "special_token = AVeryLongNameOfAFunctionThatReturnsTheToken(2)",
        "cache_key = compute_key_of_embedding_of_layer_12_and_13_and_14",
        f"hash = 'sha256:{HEX}{HEX}'",
        f"rev: {HEX}",
        f'"integrity": "sha512-{AWS}=="',
        "https://user:password@example.org",
        "f'https://{user}:{password}@{host}'",
        "https://$USER:$TOKEN@github.com; git@github.com:me/x.git; http://host:8080/a@b",
        "'mysql://%s:%s@%s' % (user, password, host)",
        "sk-learn",
    ],
)
def test_ordinary_code(text: str) -> None:
    assert not holds_secret(f"\n{text}\n".encode())


def test_names_of_files() -> None:
    assert all(
        map(is_secret, (".env", "a/prod.env", "netrc", ".aws/config", ".ssh", "my_api_key.txt"))
    )
    assert not any(map(is_secret, ("env.py", "secret_files.py", "tokens.py", "keys.yaml")))
