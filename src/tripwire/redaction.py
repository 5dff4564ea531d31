"""Redaction: what looks like a secret is removed from texts before they go into a file.

A secret is recognised by its name, by the form of a known token, or by letters and digits that make
neither words nor a digest. It becomes `<redacted 1>`, the same everywhere in one log or record, so
that equal values stay equal. Values that compiled code compares in memory aren't changed.
`TRIPWIRE_REDACT=0` turns redaction off.
"""

from __future__ import annotations

import ast
import math
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter

# A name whose value is a secret, as words in a row: `api_key`, `apiKey`, `--api-key`.
_NAMES = (
    r"passwords?|passwd|pwd|pw|pswd|passphrases?|passcodes?|secret|secrets|credential|credentials|authorization"
    r"|(?:api|access|private|secret|signing|encryption|account|auth|ssh)_?keys?"
    r"|(?:secret|client_secret|password)_(?:value|text|string|hash)|secret_key_base"
    r"|(?:db|database|smtp|mail|email|ftp|ssh|user|admin|root|redis|mysql|pg|proxy|login)_?pass"
    r"|(?:seed|recovery)_phrase|passkeys?|x_amz_signature"
    r"|passwort|kennwort|mot_de_passe|contrase[nñ]a|senha|wachtwoord"
    r"|(?:access|auth|api|bearer|refresh|session|hf|hub|github|gitlab|slack|bot|use_auth|secret|csrf"
    r"|private|personal|jwt|oauth|aws_session|id|wandb|hugging_face_hub)_?tokens?|cookie|set_cookie"
)
_SECRET_NAME = re.compile(
    rf"(?:.*_)?(?:{_NAMES})|\w*(?:password|passwd|passphrase|apikey)s?", re.DOTALL
)
# What stands beside secrets in a dict of them: `credentials = {"user": "me", "password": "x"}`.
_PLAIN_KEY = re.compile(
    r"(?:.*_)?(?:user|users|username|login|name|email|mail|host|hostname|url|uri|port|type|kind|path"
    r"|file|region|scope|scopes|id|description|help|title|label|method|scheme|provider|environment)"
)
_NAME_ALONE = re.compile(_NAMES)  # `password="password"` is a form's, and no secret
# Tokenizers have tokens, too: what stands under this name must look like a secret as well.
# So must what is called a key of a kind that isn't always one.
_PERHAPS = re.compile(
    r"(?:.*_)?(?:token|auth|pass|credentials?_\w+|salt|pepper"
    r"|(?:hmac|aes|rsa|master|session|cipher|crypto|encrypt|decrypt|webhook|app|application|consumer"
    r"|license|licence|shared|root|deploy|server|storage|service|jwt|session|fernet|storage|openai"
    r"|azure|anthropic|google|stripe|wandb|subscription)_?key)"
)
_FORMS = re.compile(
    r"""
    (?P<pem>-----BEGIN[ ](?:[A-Z0-9]+[ ])*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----
        .*?(?:-----END[ ][A-Z0-9 ]*-----|\Z))
    | (?<![A-Za-z0-9_])(?P<token>
        (?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA)[A-Z0-9]{16}            # AWS
        | gh[pousr]_[A-Za-z0-9]{20,255} | github_pat_[A-Za-z0-9_]{22,255} | glpat-[\w-]{20,}
        | hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}             # Hugging Face
        | sk-(?:[a-z]+-)*[A-Za-z0-9_-]{20,} | [rs]k_(?:live|test)_[A-Za-z0-9]{16,}
        | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,}      # Slack
        | hooks\.slack\.com/(?:services|workflows)/[\w/-]{20,}
        | discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,} | bot\d{6,12}:[\w-]{30,}
        | AIza[\w-]{35} | ya29\.[\w-]{20,} | 1//0[\w-]{40,}            # Google
        | npm_[A-Za-z0-9]{36} | pypi-[\w-]{50,} | dop_v1_[a-f0-9]{64} | SG\.[\w-]{16,}\.[\w-]{16,}
        | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*                          # JWT
        | dapi[0-9a-f]{32} | shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}       # Databricks, Shopify
        | (?:SK|AC)[0-9a-f]{32}\b | key-[0-9a-f]{32}\b | [0-9a-f]{32}-us\d{1,2}\b
      )
    | (?<=://)(?P<user>[^\s:/@'"]*):(?P<url>[^\s/@'"]+)(?=@)          # user:password@
    | (?<=://)(?P<lone>[\w-]{20,})(?=@)
    | \b(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+)+password\s+(?P<netrc>\S+)
    | (?i:\b(?:bearer|basic)\s+)(?P<bearer>[A-Za-z0-9+/=_.~-]{12,})
    | \b(?i:authorization:[ ]*(?:token|apikey|key|digest|basic|bearer)[ ]+)(?P<header>[^\s"',;]{6,})
    | \b(?i:(?:set-)?cookie:[ ]*)(?P<cookie>[\w.-]+=[^\n"']{6,})
    | (?:\bcurl\b[^\n]*?[ ]-u[ =]|(?<![\w-])--(?:(?:proxy-)?user|auth|credentials?)[\s=])["']?
      [\w.@-]+:(?!\d+\b)(?P<curl>[^\s"']+)
    | \b(?:mysql(?:dump|admin|import|show|check|slap|pump|sh)?|mariadb(?:-[a-z]+)?)(?=[\s"'])
      [^\n|;&]{0,200}?[\s"']-p["']?(?P<mysql>[^\s"',|;&)\]]+)
    | \b(?:sshpass[\s"',]+-p|redis-cli\b[^\n|;&]{0,200}?[\s"']-a
        |openssl\b[^\n|;&]{0,200}?[\s"']pass:|docker[\s"',]+login\b[^\n|;&]{0,200}?[\s"']-p)[\s"',]*(?P<passed>[^\s"',|;&)\]]+)
    | <(?P<tag>[\w-]+)>(?P<tagged>[^<>\n]+)</(?P=tag)>
    | \bname:[ ]*["']?(?P<listed>[\w-]+)["']?[ ]*\n[ ]*value:[ ]*(?P<held>[^\s"']+)     # YAML
    | (?<![\w-])--(?P<option>[\w-]+)[ ]["']?(?P<optional>[^\s"'<>|-][^\s"'<>|]*)
    | (?:[?&]|\b)(?P<name>[\w-]+)=(?![rbufRBUF]{1,2}['"])            # --password=x, ?token=x
    """,
    re.VERBOSE | re.DOTALL,
)
_GIVEN = re.compile(r"""[^\s&'",;)\]}]+""")
# `password: x-1` in a message or in YAML. In prose and annotations words follow, so it has a digit.
_STATED = re.compile(r"\b([\w-]+):([ \t]*)([^\s'\",;(){}\[\]=|]{6,})(?=[\s,;'\"]|\Z)")
# `password 'x-1'`, `the password is x-1`.
_SAID = re.compile(
    r"(?i:\b(password|passwd|passphrase|passcode|api[ _-]key)[ ](?:(?:is|was)[ ])?)"
    r"(?:(?P<quote>['\"])(?P<quoted>[^'\"\n]+)(?P=quote)|(?P<bare>[^\s'\",;(){}\[\]=|]{6,}))"
)
# A line of an INI file; what could be an expression of Python's isn't one.
_ASSIGNED = re.compile(
    r"^[ \t]*([\w.-]+)[ \t]+=[ \t]+(?!\d)([^\s'\",;(){}\[\]=|]{5,})[ \t]*$", re.MULTILINE
)
# JSON in a string: `"{\\"password\\": \\"x\\"}"`, escaped once or more often.
_ESCAPED = re.compile(
    r"""(?P<open>\\+["'])(?P<name>[\w-]+)(?P=open)\s*[:=,]\s*(?P<quote>\\+["'])"""
    r"""(?P<given>(?:(?!(?P=quote))[^\n])*)(?P=quote)"""
)
# A string of Python's, and what stands before it; comments are skipped over.
_LITERAL = re.compile(
    r"""(?P<prefix>(?:\b[rbuRBU]{1,2})?)(?P<text>'''(?:\\.|(?!''').)*'''|\"\"\"(?:\\.|(?!\"\"\").)*\"\"\""""
    r"""|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")""",
    re.DOTALL,
)
# The same, and comments: what isn't code in source.
_NO_CODE = re.compile(rf"(?P<comment>\#[^\n]*)|{_LITERAL.pattern}", re.DOTALL)
_FORMATTED = re.compile(r"(?:\b[fF][rR]?|\b[rR][fF])\Z")
_IN_BRACES = re.compile(r"(\{\{|\}\}|\{[^{}]*\})")
_BEFORE = re.compile(
    r"""(?:\[\s*['"](?P<item>[\w ./:-]+)['"]\s*\]|['"](?P<key>[\w ./:-]+)['"]"""
    r"""|(?P<name>\b\w[\w-]*))\s*(?:\)\s*)?(?::[\w.| ]*+(?:\[[^=:'"\n]{0,80}\][\w.| ]*+)?=(?!=)"""
    r"""|[=!]=|:(?:[^\n→]{0,160}→)?|=>|=(?!=)"""
    r"""|\bis(?:\s+not)?\b)\s*(?:[\w.]*[sS]ecret\w*)?\(?\s*(?P<formatted>[fF][rR]?|[rR][fF])?\Z"""
)
_BEHIND = re.compile(r"\s*[!=]=\s*(?:\w+\.)*(\w+)")  # 'x' == password
# password = find() or 'x', and `x if y else 'x'`.
_OR_ELSE = re.compile(
    r"""\b(\w+)\s*=(?!=)\s*(?:[^\n=;,()]|\([^()\n]*\)){0,160}\b(?:or|else)\s+\(?\s*\Z"""
)
# add_argument("--password", default="x"), password: str = Field(default="x").
_DEFAULT = re.compile(r"\bdefault(?:_factory)?\s*=\s*(?:lambda:\s*)?\Z")
_HAS_DEFAULT = re.compile(
    r"""(?:\(\s*['"]--?(?P<option>[\w-]+)['"]|\b(?P<name>\w+)\s*(?::[^=\n]{0,80})?=\s*[\w.]+\()"""
    r"""(?:[^()'"]|'[^'\n]*'|"[^"\n]*")*\bdefault(?:_factory)?\s*=\s*(?:lambda:\s*)?\Z"""
)
# user, password = "me", "x": the names, and what stands before the literal.
_UNPACKED = re.compile(
    r"""[ \t]*((?:[\w.]+[ \t]*,[ \t]*)+[\w.]+)[ \t]*=(?!=)[ \t]*\(?"""
    r"""((?:[^\n,'"()]|\([^()\n]*\)|'[^'\n]*'|"[^"\n]*"|,)*)\Z"""
)
_NO_COMMA = re.compile(r"""\([^()\n]*\)|'[^'\n]*'|"[^"\n]*\"""")
# ("password", "x"), and a call with both: `setdefault("API_KEY", "x")`, `setattr(cfg, "key", "x")`.
_PAIR = re.compile(
    r"""(?:[(\[]|\b(?:setattr|getattr|set)\([^()]*,)\s*[rbuRBU]{0,2}"""
    r"""(?P<quote>['"])(?P<name>[\w-]+)(?P=quote)\s*,\s*\Z"""
)
# {"name": "password", "value": "x"}, <add key="password" value="x">; auth=("me", "x").
_TOLD = re.compile(
    r"""(?:['"](?:name|key)['"]\s*:\s*['"](?P<json>[\w-]+)['"]\s*,\s*['"]value['"]\s*:"""
    r"""|\b(?:name|key)=['"](?P<xml>[\w-]+)['"]\s+value=)\s*\Z"""
)
# PASSWORDS = ["a", "b"], credentials={"me": "x"}, `in ("a", "b")`: what a container holds.
_CONTAINER = re.compile(
    r"""(?:\[\s*['"](?P<item>[\w-]+)['"]\s*\]|['"](?P<key>[\w-]+)['"]|(?P<name>\b\w[\w-]*))\s*"""
    r"""(?:(?::[\w.| ]*+(?:\[[^=:'"\n]{0,80}\][\w.| ]*+)?=(?!=)|[=!]=|=(?!=)|\bin\b)"""
    r"""\s*(?:(?:set|frozenset|tuple|list|dict|deque|OrderedDict)\(\s*)?"""
    r"""|:(?:[^\n→]{0,160}→)?\s*)"""
    r"""[\[({](?=\s*[rbuRBU]{0,2}['"])"""
)
_HELD = re.compile(r"""(?:[^\[\](){}"']|'[^'\n]*'|"[^"\n]*")*+""")
_KEY_BEFORE = re.compile(r"""['"]([^'"\n]*)['"]\s*:\s*[rbuRBU]{0,2}\Z""")
_LOG_IN = re.compile(
    r"""(?:\bauth\s*=\s*\(|\b(?:\w*(?:Basic|Digest|Proxy)Auth|login)\()\s*"""
    r"""(?:['"][^'"\n]*['"]|[\w.]+)\s*,\s*\Z"""
)
_END_OF_PAIR = re.compile(r"\s*,?\s*[)\]]")
_BARE_WORDS = re.compile(r"[A-Za-z_][A-Za-z_ -]*")  # in a pair this is another name, or prose
_FETCHED = re.compile(
    r"^\s*(\w+) = .*?(?:'([\w ./:-]+)'\)|\['([\w ./:-]+)'\]|\.(\w+))$", re.MULTILINE
)
_LAST_STEP = re.compile(r"(?:\['([\w ./:-]+)'\]|\b([A-Za-z_]\w*))$")
# Variables of the environment: that they changed is told, and never to what.
_ENVIRONMENT = re.compile(r"\benviron'?\]?\[[^\]]+\]$")
_CHANGED_VARIABLE = re.compile(
    r"(\benviron'?\]?\[b?(?:'[^']*'|\"[^\"]*\")\]): "
    r"(?:b?(?:'[^'\n]*'|\"[^\"\n]*\")|[^→\n]*) → (?:b?(?:'[^'\n]*'|\"[^\"\n]*\")|[^\s(;]+)"
)
_UNWRITTEN = "<not written: a variable of the environment>"
_LONGEST_WORD = 512
_WORD = re.compile(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+_-]{{24,{_LONGEST_WORD}}}(?![A-Za-z0-9+/_-])")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/=_.-])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=_.-])")  # AWS has 40
_IN_WORDS = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{3,}")
_HEX = re.compile(
    r"[+-]?(?:0[xX])?(?:[0-9a-f]+|[0-9A-F]+)"
    r"|[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
)
_VARIABLE = re.compile(r"[A-Z]+(?:_[A-Z]+)+")
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9A-F]{32}")  # in a name: `group__STREAM_1g9d05...`
# What code hands on under a name: `key=self.key`, `key=find(`, `key=os.environ[`, `f"key={key}"`.
_HANDED_ON = re.compile(r"\{.*|%\w|(?:self|cls)\.\w+|[A-Za-z_][\w.()]*[(\[][(\[{]*")
_CODE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:[ +*/%@&^<>.-]+\w+)*")
_SURE = ("pem", "token", "url", "netrc", "bearer", "mysql")  # the forms that prose never has
_TOLD_BY_FORM = (*_SURE, "lone", "header", "cookie", "curl", "passed")
_TOLD_BY_NAME = (("tag", "tagged"), ("listed", "held"), ("option", "optional"))
_INNER_CASE = re.compile(r"[a-z][A-Z]")
_CODE_NAME = re.compile(r"(?:[A-Za-z_]\w*(?:\(\))?\.)*([A-Za-z_]\w*)")
_MARK = re.compile(r"<redacted \d+>\n*")
_EMPTY = re.compile(
    r"\W*|(?i:none|null|true|false|\*+|x+|your[\w-]*|\.\.\.|change_?me|<.*>|\$\{?\w+\}?)"
)
_LEAST_ENTROPY = 4.0  # bits a letter; English words and paths have about 3
_SHORTEST_ELSEWHERE = 6  # of a value that is replaced where no name says what it is
_SHORTEST_KNOWN = 4  # a shorter one is replaced under its name alone
_MOST_KNOWN = 1000


def is_wanted() -> bool:
    """Whether secrets are taken out of what is written."""
    return os.environ.get("TRIPWIRE_REDACT", "1") != "0"


class Redactor:
    """Takes secrets out of the texts of one file, and counts them."""

    def __init__(self, wanted: bool | None = None) -> None:
        self.wanted = is_wanted() if wanted is None else wanted
        self.count = 0  # places
        self.found: list[str] = []  # for each secret, the name or the form that told it
        self._marks: dict[str, str] = {}
        self._passed: set[str] = set()  # texts without any of them
        self._searched: str | None = None  # the text that these containers of secrets are in
        self._containers: list[tuple[str, int, int]] = []

    def learn(self, value: str, name: str | None = None) -> bool:
        """Whether a whole value is a secret: then it is known from now on."""
        if not self.wanted or not is_secret(value, name):
            return False
        self._mark(value, name)
        return True

    def clean(self, text: str, name: str | None = None) -> str:
        """A text without secrets. `name` is what it stands under; a text may be Python's source."""
        if not text:
            return text
        text = _CHANGED_VARIABLE.sub(rf"\1: {_UNWRITTEN}", text) if "environ" in text else text
        if not self.wanted or text in self._passed or _MARK.fullmatch(text):
            return text
        cleaned = self._clean(text, name)
        if cleaned == text and len(self._passed) < _MOST_KNOWN and len(text) < 1000:
            if name is None or not is_secret_name(name):
                self._passed.add(text)
        return cleaned

    def _clean(self, text: str, name: str | None) -> str:
        if text in self._marks or is_secret(text, name):
            self.count += 1
            return self._mark(text, name)
        for value, mark in self._marks.items():
            if len(value) >= _SHORTEST_ELSEWHERE and value in text:
                self.count += text.count(value)
                text = text.replace(value, mark)
        if len(text) < 7:
            return text
        text = self._sub_forms(text)
        text = _STATED.sub(self._replace_stated, text) if ":" in text else text
        text = _SAID.sub(self._replace_said, text)
        text = _ASSIGNED.sub(self._replace_assigned, text) if " = " in text else text
        text = _ESCAPED.sub(self._replace_escaped, text) if "\\" in text else text
        if "'" in text or '"' in text:
            text = self._sub_literals(text)
        text = _BASE64.sub(self._replace_word, text)
        return _WORD.sub(self._replace_word, text)

    def clean_source(self, source: str) -> str:
        """Python's source: its strings and comments without secrets. Its code stays code."""
        return _NO_CODE.sub(self._replace_in_source, source) if self.wanted else source

    def clean_guards(self, source: str) -> str:
        """Code that compares: `v1 = get(v0, 'password')`, and then `v1 == 'x'`."""
        if not self.wanted:
            return source
        for variable, *names in _FETCHED.findall(source):
            name = next(filter(None, names))
            if is_telling(name):
                compared = rf"\b{variable} == ({_LITERAL.pattern})"
                for found in re.finditer(compared, source, re.DOTALL):
                    self.learn(str(ast.literal_eval(found[1])), name)
        return self.clean(source)

    def clean_at(self, text: str, source: str) -> str:
        """What was seen at a source such as `G['cfg'].password`, as `repr` spells it."""
        if _ENVIRONMENT.search(source):
            return _UNWRITTEN
        last = _LAST_STEP.search(source)
        around = _LAST_STEP.search(source[: last.start()]) if last else None
        names = [step and (step[1] or step[2]) for step in (last, around)]
        found = find_name(names[0], names[1]) if names[0] else None
        name = f"{found} = " if found else ""
        return self.clean(name + text).removeprefix(name)

    def clean_arguments(self, arguments: Iterable[str]) -> tuple[str, ...]:
        """A command line: `--password x` has the name in one argument and the value in the next."""
        cleaned, before = [], ""
        for argument in arguments:
            option = before if before.startswith("-") and "=" not in before else None
            done = self.clean(argument, option)
            if option is not None and done == argument:  # perhaps both tell more: `--user me:x`
                done = self.clean(f"{option} {argument}").removeprefix(f"{option} ")
            cleaned.append(done)
            before = argument
        return tuple(cleaned)

    def clean_bytes(self, data: bytes) -> bytes:
        """The same for bytes that are a text."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return data
        return self.clean(text).encode()

    def _mark(self, value: str, why: str | None) -> str:
        mark = self._marks.get(value)
        if mark is None:
            self.found.append(_words(why) if why else "a token")
            # As many lines as there were: what stands below keeps its number.
            mark = f"<redacted {len(self.found)}>" + "\n" * value.count("\n")
            if len(value) >= _SHORTEST_KNOWN and len(self._marks) < _MOST_KNOWN:
                self._marks[value] = mark
                self._passed.clear()
        return mark

    def _hide(self, found: re.Match[str], group: str | int, why: str | None = None) -> str:
        self.count += 1
        start, end = (place - found.start() for place in found.span(group))
        return found[0][:start] + self._mark(found[group], why) + found[0][end:]

    def _sub_forms(self, text: str) -> str:
        """What stands under a name that tells nothing may have a form: `URL=https://me:x@host`."""
        parts, done, at = [], 0, 0
        while found := _FORMS.search(text, at):
            (start, end), why = _find_in_form(found)
            if start == end:
                at = max(start, found.start() + 1)
                continue
            self.count += 1
            parts += [text[done:start], self._mark(text[start:end], why)]
            done = at = end
        return "".join((*parts, text[done:])) if parts else text

    def _replace_stated(self, found: re.Match[str]) -> str:
        name, gap, value = found.groups()
        is_one = _has_digits(value) and _is_given(value, name) and (gap or "-" in name)
        return self._hide(found, 3, name) if is_one else found[0]

    def _replace_said(self, found: re.Match[str]) -> str:
        group = "quoted" if found["quoted"] else "bare"
        value = found[group]
        is_plain = not is_paired(value) if found["quoted"] else value.rstrip(".:!?").isalnum()
        is_one = _has_digits(value) and not is_plain and _is_given(value, found[1])
        return self._hide(found, group, found[1]) if is_one else found[0]

    def _replace_assigned(self, found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        is_code = _CODE_NAME.fullmatch(value) or (_CODE.fullmatch(value) and not _is_mixed(value))
        is_one = _has_digits(value) and not is_code and _is_given(value, name)
        return self._hide(found, 2, name) if is_one else found[0]

    def _replace_escaped(self, found: re.Match[str]) -> str:
        name, given = found["name"], found["given"]
        return self._hide(found, "given", name) if is_secret(given, name) else found[0]

    def _replace_in_source(self, found: re.Match[str]) -> str:
        if found["comment"]:
            return self._clean(found[0], None)
        return self._replace_literal(found, whole=True)

    def _replace_literal(self, found: re.Match[str], whole: bool = False) -> str:
        before = _BEFORE.search(found.string, max(0, found.start() - 160), found.start())
        name = _find_pair(found)
        is_beside = name is not None
        if name is None:
            name = _find_afar(found)
        if name is None and before is not None:
            name = before["item"] or before["key"] or before["name"]
        spelled = found["text"]
        if before and before["formatted"] and "{" in spelled:
            name = None
        quote = spelled[:3] if spelled.startswith(("'''", '"""')) else spelled[0]
        try:
            value = ast.literal_eval(found[0])
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return found[0]
        value = value.decode("latin-1") if isinstance(value, bytes) else value
        is_beside = is_beside or (name is not None and " " in name)  # a title, with a text
        if is_beside and not is_paired(value):
            name = None
        if name is None or not is_secret_name(name):
            name = self._find_container(found, value) or name
        if value not in self._marks and not is_secret(value, name):
            inside = spelled[len(quote) : -len(quote)]  # a docstring, or code as a text
            inside = self._clean_inside(found, inside) if whole else self._sub_literals(inside)
            return f"{found['prefix']}{quote}{inside}{quote}"
        self.count += 1
        mark = self._mark(value, name).replace("\n", "")
        return found["prefix"] + quote + mark + "\n" * spelled.count("\n") + quote

    def _find_container(self, found: re.Match[str], value: str) -> str | None:
        """The name of the list or dict of secrets in which a literal was found."""
        text, end = found.string, found.start()
        if self._searched is not text:
            self._searched, self._containers = text, list(_find_containers(text))
        nearest = bisect_right(self._containers, end, key=itemgetter(1)) - 1
        if nearest < 0 or end >= self._containers[nearest][2]:
            return None
        name: str | None = self._containers[nearest][0]
        if text[found.end() : found.end() + 9].lstrip()[:1] == ":":
            return None  # a key
        key = _KEY_BEFORE.search(text, max(0, end - 160), end)
        name = find_name(key[1], name) if key else name
        return None if is_telling(value) else name

    def _sub_literals(self, text: str) -> str:
        return _LITERAL.sub(self._replace_literal, text)

    def _clean_inside(self, found: re.Match[str], inside: str) -> str:
        """What a string in source says, except for code in the braces of a formatted one."""
        before = found.string[max(0, found.start() - 2) : found.start()]
        if not _FORMATTED.search(before):
            return self._clean(inside, None)
        parts = _IN_BRACES.split(inside)
        parts[::2] = [self._clean(part, None) for part in parts[::2]]
        return "".join(parts)

    def _replace_word(self, found: re.Match[str]) -> str:
        return self._hide(found, 0) if looks_random(found[0]) else found[0]


def is_secret(value: str, name: str | None) -> bool:
    """Whether a whole value is a secret, by its name or by itself."""
    if _EMPTY.fullmatch(value) or _MARK.fullmatch(value) or _NAME_ALONE.fullmatch(value):
        return False
    if _VARIABLE.fullmatch(value) and is_secret_name(value):  # `"GITHUB_TOKEN"`: where to look
        return False
    if name is not None and (is_secret_name(name) or _is_pass(value, name)):
        return True
    if name is not None and _PERHAPS.fullmatch(_words(name)) and _is_mixed(value):
        return True
    found = _FORMS.fullmatch(value)
    return bool(found and (found["pem"] or found["token"])) or looks_random(value)


def _find_pair(found: re.Match[str]) -> str | None:
    """The name in a pair of literals whose second one was found."""
    text, start, end = found.string, max(0, found.start() - 160), found.start()
    told = _TOLD.search(text, start, end)
    if told is not None:
        return told["json"] or told["xml"]
    if not _END_OF_PAIR.match(text, found.end()):
        return None
    if _LOG_IN.search(text, start, end):
        return "password"
    before = _PAIR.search(text, start, end)
    return before["name"] if before else None


def _find_in_form(found: re.Match[str]) -> tuple[tuple[int, int], str | None]:
    """Where in a form its secret is, and the name that told it; without one, where to look on."""
    for group in _TOLD_BY_FORM:
        value = found[group]
        if value and _MARK.search(value) is None and (group in _SURE or _is_drawn(value, group)):
            if group != "bearer" or _is_mixed(value):
                return found.span(group), None
    for told, group in _TOLD_BY_NAME:
        if value := found[group]:
            is_one = _has_digits(value) and _is_given(value, found[told])
            start, end = found.span(group)
            return (start, end if is_one else start), found[told]
    name, end = found["name"], found.end()
    if name:
        # What no name tells is a word of letters and digits: it isn't looked for any further.
        most = len(found.string) if is_telling(name) else end + _LONGEST_WORD + 1
        given = _GIVEN.match(found.string, end, most)
        if given and _is_given(given[0], name):
            return given.span(), name
    return (end, end), None


def _is_drawn(value: str, group: str) -> bool:
    return _has_digits(value) or (group == "header" and _INNER_CASE.search(value) is not None)


def _find_afar(found: re.Match[str]) -> str | None:
    """The name of a literal that stands elsewhere than right before it."""
    text, start = found.string, found.start()
    behind = _BEHIND.match(text, found.end())
    if behind is not None:
        return behind[1]
    near = max(0, start - 400)
    if _DEFAULT.search(text, max(0, start - 40), start):
        call = _HAS_DEFAULT.search(text, near, start)
        return (call["option"] or call["name"]) if call else None
    line = max(near, text.rfind("\n", 0, start) + 1)
    unpacked = _UNPACKED.match(text, line, start)
    if unpacked is not None:
        names, number = unpacked[1].split(","), _NO_COMMA.sub("", unpacked[2]).count(",")
        return names[number].strip() if number < len(names) else None
    other = _OR_ELSE.search(text, line, start)
    return other[1] if other else None


def _find_containers(text: str) -> Iterator[tuple[str, int, int]]:
    """Lists and dicts under the names of secrets: the name, and where they begin and end."""
    for found in _CONTAINER.finditer(text):
        name = found["item"] or found["key"] or found["name"]
        if is_secret_name(name):
            held = _HELD.match(text, found.end())
            assert held is not None  # it may be empty
            yield name, *held.span()


def find_name(key: str, around: str | None) -> str | None:
    """What tells of a value under a key of a dict: the key, or the dict's own name."""
    if around is None or not is_secret_name(around) or is_secret_name(key):
        return key
    return None if _PLAIN_KEY.fullmatch(_words(key)) else around


def is_telling(name: str) -> bool:
    """Whether a name may be a secret's."""
    return is_secret_name(name) or _PERHAPS.fullmatch(_words(name)) is not None


def is_paired(value: str) -> bool:
    """Whether a text that stands beside a name may be its value, and isn't another name."""
    return _BARE_WORDS.fullmatch(value) is None


def _is_given(value: str, name: str) -> bool:
    """Whether a value that a text has without quotes is a secret."""
    if value.isdecimal() and _words(name) == "pw":  # a width, as torch has it
        return False
    if _words(name) == "pass" and not _is_mixed(value):  # `second pass: 12 of 20`
        return False
    return not (_MARK.search(value) or _is_handed_on(value)) and is_secret(value, name)


def _is_handed_on(given: str) -> bool:
    """Whether it is an expression of Python's, or a name for a secret, and not the secret."""
    code = _CODE_NAME.fullmatch(given)
    return _HANDED_ON.fullmatch(given) is not None or bool(code and is_secret_name(code[1]))


def is_secret_name(name: str) -> bool:
    """Whether what stands under a name is a secret, whatever it is."""
    return _SECRET_NAME.fullmatch(_words(name)) is not None


def looks_random(text: str) -> bool:
    """Whether letters and digits are drawn, as in a key; digests and UUIDs are no secrets."""
    is_word = _WORD.fullmatch(text) or (_BASE64.fullmatch(text) and _has_cases(text))
    if not is_word or _HEX.fullmatch(text) or _DIGEST.search(text) or not _is_mixed(text):
        return False
    # Names of kernels, classes and files are made of words; a key seldom has one.
    words = sum(map(len, _IN_WORDS.findall(text)))
    return words < len(text) * 0.6 and _entropy(text) >= _LEAST_ENTROPY


def _is_pass(value: str, name: str) -> bool:
    """`{"user": "me", "pass": "x-1"}`, where compilers have passes, too."""
    return _words(name) == "pass" and _has_digits(value) and any(map(str.isalpha, value))


def _is_mixed(text: str) -> bool:
    if len(text) < 16 or any(c.isspace() for c in text):
        return False
    return _has_digits(text) and any(map(str.isalpha, text))


def _has_digits(text: str) -> bool:
    return any(map(str.isdigit, text))


def _has_cases(text: str) -> bool:
    return any(map(str.isupper, text)) and any(map(str.islower, text))


def _entropy(text: str) -> float:
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _words(name: str) -> str:
    """`apiKey`, `--api-key` and `API_KEY` as `api_key`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-_ '\""))
    return re.sub(r"[\W_]+", "_", parted).lower()


def without_numbers(text: str) -> str:
    """A redacted text as another file's would be: only the numbers of its marks differ."""
    return re.sub(r"<redacted \d+>", "<redacted>", text)
