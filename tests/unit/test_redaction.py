"""What looks like a secret is in no log and in no explanation; what doesn't is left alone."""

from __future__ import annotations

import ast
import inspect
import json
import os
import random
import string
from pathlib import Path

import pytest
import torch

import tripwire
from tripwire.redaction import Redactor, is_secret
from tripwire.telemetry.log import describe_process, logging_to
from tripwire.telemetry.schema import Instant, clean

_LETTERS = string.ascii_letters + string.digits


def drawn(count: int) -> str:
    """Letters and digits, the same in each run."""
    draw = random.Random(count)
    return "".join(draw.choices(_LETTERS, k=count))


TOKENS = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ghp_" + drawn(36),
    "github_pat_" + drawn(60),
    "hf_" + drawn(34),
    "sk-" + drawn(48),
    "sk-proj-" + drawn(48),
    "xoxb-" + "123456789012-" + drawn(24),
    f"eyJ{drawn(20)}.eyJ{drawn(30)}.{drawn(30)}",
    "glpat-" + drawn(20),
    "AIza" + drawn(35),
    "1//0" + drawn(60),
    "hooks.slack.com/services/T00000000/B00000000/" + drawn(24),
    drawn(17) + "/" + drawn(16) + "/" + drawn(5),  # as the secret keys of AWS
    "discord.com/api/webhooks/123456789012345678/" + drawn(60),
    "bot123456789:AA" + drawn(33),
    "dapi" + "0123456789abcdef" * 2,
    "shpat_" + "0123456789abcdef" * 2,
    "SK" + "0123456789abcdef" * 2,
    "key-" + "0123456789abcdef" * 2,
    "0123456789abcdef" * 2 + "-us12",
]


@pytest.mark.parametrize("name", ["hmac_key", "MASTER_KEY", "sessionKey", "salt", "app_key"])
def test_hexadecimal_digits_are_told_by_the_name_of_a_key(name):
    key = "0123456789abcdef" * 2
    assert Redactor().clean(f"{name} = '{key}'") == f"{name} = '<redacted 1>'"
    assert Redactor().clean(key, name) == "<redacted 1>"
    assert Redactor().clean(f"digest = '{key}'") == f"digest = '{key}'"


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize(
    "around", ["{}", "it is {}, I think", "f('{}')", "https://x.org/?a={}&b=1"]
)
def test_a_token_is_told_by_its_form(token, around):
    cleaned = Redactor().clean(around.format(token))
    assert token not in cleaned
    assert "<redacted 1>" in cleaned


def test_a_private_key_goes_whole_and_its_lines_stay():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"
    cleaned = Redactor().clean(f"a\n{key}\nb")
    assert cleaned == "a\n<redacted 1>\n\n\n\nb"


@pytest.mark.parametrize(
    "name",
    ["password", "DB_PASSWORD", "userPassword", "--api-key", "apiKey", "client_secret", "pwd"]
    + ["AWS_SECRET_ACCESS_KEY", "authorization", "auth_token", "hf_token", "private_key"],
)
def test_a_value_is_told_by_its_name(name):
    assert Redactor().clean("a b", name) == "<redacted 1>"


@pytest.mark.parametrize(
    "text",
    [
        'password = "x-1"',
        "password: str = 'x-1'",
        "password: Optional[dict[str, str]] = 'x-1'",
        "password: config.Text | None = 'x-1'",
        "def f(a: int, password='x-1'): pass",
        "lambda x: log_in(x, password='x-1')",
        "{'a': log_in(password='x-1')}",
        "login(user='me', password='x-1')",
        '{"password": "x-1"}',
        "L['cfg'].password == 'x-1'",
        "L['cfg']['password'] == 'x-1'",
        "G['PASSWORD']: 'x-1' → 'x-1'",
        "--password=x-1",
        "Client(authkey=b'x-1')",
        'Client(password=r"x-1")',
        "https://me:x-1@host/",
        '"""Use password = \'x-1\'."""',
        "PGPASSWORD=x-1 psql",
        "dbpassword = 'x-1'",
        "could not log in with password: abc-x-1",
        "user: me\npassword: abc-x-1\n",
        "X-Api-Key: abc-x-1",
        "headers = [('Authorization', 'x-1'), ('Accept', 'text/html')]",
        "[['api_key', 'x-1']]",
        "os.environ.setdefault('API_KEY', 'x-1')",
        "setattr(config.db, 'password', 'x-1')",
        "(b'password', b'x-1',)",
        'send("{\\"password\\": \\"x-1\\", \\"n\\": 1}")',
        "send('{\\\\\\'api_key\\\\\\': \\\\\\'x-1\\\\\\'}')",
        "machine api.x.org login me password x-1",
        "machine api.x.org\n  login me\n  account a\n  password x-1\n",
        "default login anonymous password x-1",
        "[db]\nuser = me\npassword = !x-1-abc\n",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/x-1",
        "run --password x-1",
        "run --api-key 'x-1' --verbose",
        '{"name": "password", "value": "x-1"}',
        "{'key': 'API_KEY', 'value': 'x-1'}",
        '<add key="ApiKey" value="x-1"/>',
        "- name: DB_PASSWORD\n  value: x-1\n",
        "<password>x-1</password>",
        "'password' => 'x-1'",
        'parser.set("db", "password", "x-1")',
        "Authorization: token abc-x-1",
        "Cookie: session=abc-x-1; theme=dark",
        "Set-Cookie: sid=abc-x-1",
        "curl -s -u me:x-1 https://x.org",
        "requests.get(url, auth=('me', 'x-1'))",
        "HTTPBasicAuth(user, 'x-1')",
        'api-key: "x-1"',
        'password = f"x-1"',
        "db_pass = 'x-1'",
        "SMTP_PASS=x-1",
        "secret_key_base: abc-x-1",
        "mysql -u root -px-1 db",
        "mysqldump --all -p'x-1' > a.sql",
        "mysqladmin -px-1",
        "run(['mysql', '-u', 'root', '-px-1', 'db'])",
        "mariadb-dump -h h -px-1 db",
        "sshpass -p x-1 ssh me@host",
        "Popen(['sshpass', '-p', 'x-1', 'ssh'])",
        "redis-cli -h h -a x-1 ping",
        'pw = "x-1"',
        "connect(user='me', pw='x-1')",
        "db_pw = 'x-1'",
        "user_pswd: 'x-1'",
        'PASSWORDS = ["x-1"]',
        'PASSWORDS = ["first", "x-1"]',
        "passwords: list[str] = ['first', 'x-1']",
        "passwords = {'first', 'x-1'}",
        "api_keys = ('first', 'x-1')",
        "secrets = set(['first',\n    'x-1'])",
        "credentials = {'alice': 'first', 'bob': 'x-1'}",
        "credentials = {'user': 'bob', 'alice': 'x-1'}",
        '{"credentials": {"alice": "x-1"}}',
        "login(credentials=dict({'alice': 'x-1'}))",
        "G['PASSWORDS']: ['first'] → ['x-1']",
        "L['cfg']['passwords'] == ['first', 'x-1']",
        "if password in ('first', 'x-1'): pass",
        'PASSWORDS = ["a(b", "c[d", "x-1"]',
        "DATABASE_URL=postgres://me:x-1@host/db",
        "serve --database-url=postgres://me:x-1@host/db",
        "serve --database-url postgres://me:x-1@host/db",
        "<url>postgres://me:x-1@host/db</url>",
        "OPTIONS=--password=x-1",
        "docker run --env=DB_PASSWORD=x-1 --env API_KEY=x-1 image",
        "helm install --set db.password=x-1",
        "curl -H 'X-Api-Key: abc-x-1' https://x.org",
        "curl -H X-Api-Key:abc-x-1 https://x.org",
        "serve --user me:x-1",
        "serve --auth=me:x-1",
        "docker login -u me -p x-1 registry",
        "openssl rsa -passin pass:x-1",
        "Authorization: Basic abcx-1",
        "{'sasl.password': 'x-1'}",
        "{'Secret Key': 'x-1'}",
        "config['db/password'] = 'x-1'",
        "{'user': 'me', 'pass': 'x-1'}",
        "user, password = 'me', 'x-1'",
        "user, password, port = find(), 'x-1', 5",
        "password = os.environ.get('PW') or 'x-1'",
        "password = given if given else 'x-1'",
        "password = None or ('x-1')",
        "if 'x-1' == password: pass",
        "parser.add_argument('--password', default='x-1')",
        "parser.add_argument('--password', type=str, help='the one', default='x-1')",
        "@click.option('--api-key', '-k', default='x-1')",
        "password: str = Field(default='x-1')",
        "password: str = field(default_factory=lambda: 'x-1')",
        "getattr(config, 'password', 'x-1')",
        "Login(password=SecretStr('x-1'))",
        "server.login('me@x.org', 'x-1')",
        "aiohttp.BasicAuth('me', 'x-1')",
        "ValueError: invalid password 'x-1' for user me",
        "login failed for me with password abc-x-1",
        "# the password is abc-x-1 now",
        "passwort = 'x-1'",
        "mot_de_passe = 'x-1'",
        "https://a.x.org/k?X-Amz-Signature=x-1",
    ],
)
def test_a_secret_in_source_or_in_a_reason_is_told_by_what_stands_before_it(text):
    assert "x-1" not in Redactor().clean(text)


@pytest.mark.parametrize(
    "text",
    [
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "123e4567-e89b-12d3-a456-426614174000",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "Qwen3ForCausalLMOutputWithPast2",
        "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py:116",
        "model.layers.12.self_attn.q_proj.weight",
        "https://github.com/o/r/blob/94f5e16708329d2f2716426868ec89aa774af016/a.py",
        "def f(token='abc', pad_token='<pad>', num_tokens=3, key=None): pass",
        "tensor float32 [2, 3]",
        "def f(password: str, name='bob'): pass",
        "{password: log_in(name='bob')}",
        "Client(address, authkey=self._authkey)",
        "connect(password=password, api_key=config.load().api_key)",
        "login(password=getpass.getpass(), api_key=os.environ['KEY'])",
        "f'password={password}' + 'password=%s' % password",
        "-0x1234567890abcdef12345",
        "+0X001234567890ABCDEF12345",
        "password: str | None, the password: anything that opens it",
        "def connect(user='root', password='password'): pass",
        "https://x.org/group__CUDART__STREAM.html#group__CUDART__STREAM_1g9d0535d93a214cbf126835257b16ba85",
        "ENV_GITHUB_TOKEN = 'GITHUB_TOKEN'",
        "fields = ('password', 'username')",
        "fields = ('password', 'user1', 'user2')",
        "add_argument('--password', help='the one of user 1')",
        "log in with your login and password please",
        "cache_key = 'e3b0c44298fc1c149afbf4c8996fb924'",
        "the machine that you use has a default password policy",
        "password = config.db1.password",
        "password = first1 + second2",
        "api_key = key1",
        "use --password FILE, or --api-key KEY",
        "run --token-file a1.txt --tokens 12345678",
        "docker run -u 1000:1000 image",
        "<b1>2</b1><secret>your secret</secret>",
        "{'name': 'password', 'value': 'a field of the form'}",
        "Authorization: how a user of group 1 logs in",
        "the cookie: a small text",
        "forward_pass = 'pass 1'",
        "('name', 'password 1')",
        "auth = ('basic', 'digest')",
        "mysql -P 3306 -p database1",
        "mysql --port=3306 --protocol=tcp",
        "mysql_bench.py -parallel4",
        "python train.py -p8 -a1",
        "cp -pr2 mysql backup",
        "pw = 3; ph = 4; pw_kernel = 'pointwise1'",
        "conv(pw=1, mode='same1')",
        "SECRET_NAMES = ['token1', 'name2']",
        "secrets = ['password', 'token', 'GITHUB_TOKEN']",
        "password_fields = ['first1', 'second2']",
        "credentials = {'user': 'bob1', 'host': 'a1.x.org'}",
        "passwords = load(['a1.txt', 'b2.txt'])",
        "password: Literal['a1', 'b2'], name: str",
        "special_tokens = ['<s1>', '<s2>']",
        "log_in(password, names=['a1', 'b2'])",
        "passwords = []; names = ['a1', 'b2']",
        "if name in ('password', 'user1', 'a1'): pass",
        "DATABASE_URL=postgres://host:5432/db1",
        "serve --url=https://x.org/a1?b=c2",
        "docker run --user 1000:1000 image",
        "{'model.name': 'bert-1', 'Max Length': '512'}",
        "{'pass': 'fuse_linear'}",
        "user, name = 'me', 'bob1'",
        "password, names = load(), ['a1', 'b2']",
        "name = os.environ.get('PW') or 'a1'",
        "password = load('a1') or None",
        "if 'a1' == name: pass",
        "parser.add_argument('--name', default='a1')",
        "parser.add_argument('--password'); parser.add_argument('--name', default='a1')",
        "getattr(config, 'name', 'a1')",
        "name: str = Field(default='a1')",
        "the password of user1 is checked",
        "a password that is at least 8 characters",
        "the password 'field' is required",
        "password is None, password is not None",
        "login('me', retries=3)",
        "size = torch.Size([1, 2]); image: a1:b2@sha256",
    ],
)
def test_what_is_no_secret_is_left_alone(text):
    assert Redactor().clean(text) == text


@pytest.mark.parametrize(
    "data",
    [
        {"passwords": ["first", "of-a-list-1"]},
        {"credentials": {"alice": "of-a-dict-1"}},
        {"credentials": {"alice": {"of": ["of-a-dict-1"]}}},
        {"pw": "of-a-name-1"},
    ],
)
def test_what_a_container_of_secrets_holds_is_in_no_event(data, tmp_path):
    kept = {"names": ["first-1"], "secrets": {"user": "alice-1"}}
    with logging_to(tmp_path) as log:
        log.write(Instant(time_ns=1, name="i", data={**data, "kept": kept}))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "of-a" not in text
    assert "first-1" in text and "alice-1" in text


def test_what_was_seen_inside_a_dict_of_secrets_is_told_by_the_dict():
    seen = Redactor().clean_at("'x-1'", "G['credentials']['alice']")
    assert seen == "'<redacted 1>'"
    assert Redactor().clean_at("'x-1'", "G['credentials']['user']") == "'x-1'"
    assert Redactor().clean_at("'x-1'", "G['names']['alice']") == "'x-1'"


def test_only_the_value_goes_and_not_its_letters_in_the_name():
    assert Redactor().clean("f(api_key=k, x=1)") == "f(api_key=<redacted 1>, x=1)"


SOURCE = """
def connect(x, secret={value!r}, api_key=other.key2, n=12345):  # password: abc-12
    'Call it with password="abc-12" or --password=abc-12.'
    told = f"Bearer {{connect}} password=abc-12 {{{{connect}}}} {{x!r:>{{n}}}}"
    return connect(x, secret=abc1, password=pw, api_key=keys[0]), told, "password"
"""


@pytest.mark.parametrize("value", ["connect", "secret", "api_key", "return", "abc-12", "told, "])
def test_source_without_its_secrets_is_the_same_code(value):
    source = SOURCE.format(value=value)
    redactor = Redactor()
    redactor.learn(value, "password")
    cleaned = redactor.clean_source(source)
    assert "abc-12" not in cleaned

    def names(text: str) -> list[str]:
        return [type(node).__name__ + getattr(node, "id", "") for node in ast.walk(ast.parse(text))]

    assert names(cleaned) == names(source)


def test_strings_of_torch_are_no_secrets():
    taken = total = 0
    for module in (torch.nn.functional, torch.nn.modules.module, torch.overrides):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                total += 1
                taken += is_secret(node.value, None)
    assert total > 1000
    assert taken == 0


def test_a_redacted_text_is_redacted_no_more():
    redactor = Redactor()
    once = redactor.clean("password = 'abc-1'")
    assert redactor.clean(once) == once
    assert Redactor().clean(once) == once


def test_a_command_line_is_without_its_secrets():
    given = ["x.py", "--token", drawn(30), "--password", "p", "--n", "3", "--api-key=k"]
    cleaned = Redactor().clean_arguments(given)
    assert cleaned[:2] + cleaned[3:4] + cleaned[5:7] == (
        "x.py",
        "--token",
        "--password",
        "--n",
        "3",
    )
    assert not {drawn(30), "p", "--api-key=k"} & set(cleaned)


def test_a_header_has_ranks_that_are_numbers_and_no_other_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    header = clean(describe_process(), Redactor())
    assert header.ranks["RANK"] == "3"
    assert "10.1.2.3" not in str(header)


PASSWORD = "of-the-world-1"


class Service:
    api_key = "of-the-class-2"


def run(folder: Path) -> tuple[str, str]:
    """A program that reads secrets, and its log and explanation."""
    global PASSWORD
    PASSWORD = "of-the-world-1"

    def uses(x, options):
        token = os.environ.get("OF_MY_OWN")
        return x + 1 if PASSWORD and Service.api_key and options["password"] and token else x

    compiled = tripwire.compile(uses, backend="eager")
    with logging_to(folder):
        for variable, given in (("in-env-3", "given-4"), ("in-env-5", "given-6")):
            os.environ["OF_MY_OWN"] = variable
            compiled(torch.ones(1), {"password": given})
            PASSWORD = "of-the-world-7"
        compiled(torch.ones(1), {"password": given})
    (log,) = folder.glob("*.jsonl")
    explained = tripwire.explain(compiled)
    return log.read_text(), f"{explained} {json.dumps(explained.data())}"


_WRITTEN = ["of-the-world-1", "of-the-world-7", "of-the-class-2", "given-4", "given-6"]
_ENVIRONMENT = ["in-env-3", "in-env-5"]


def test_logs_and_explanations_hold_no_secret_and_no_value_of_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OF_MY_OWN", "")
    for text in run(tmp_path):
        assert [secret for secret in _WRITTEN + _ENVIRONMENT if secret in text] == []
        assert "OF_MY_OWN" in text
        assert "<redacted" in text


def test_tripwire_redact_0_writes_secrets_and_still_no_value_of_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OF_MY_OWN", "")
    monkeypatch.setenv("TRIPWIRE_REDACT", "0")
    for text in run(tmp_path):
        assert [secret for secret in _WRITTEN if secret not in text] == []
        assert [secret for secret in _ENVIRONMENT if secret in text] == []


def test_what_was_redacted_is_counted(tmp_path, monkeypatch):
    from tripwire.telemetry import statistics

    monkeypatch.setenv("OF_MY_OWN", "")
    before = statistics().groups.get("redaction", {}).get("values", 0)
    log, _ = run(tmp_path)
    assert json.loads(log.splitlines()[0])["redacts"] is True
    assert statistics().groups["redaction"]["values"] > before
