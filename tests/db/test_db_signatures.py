"""Signed databases: who signed a file is checked to the byte and before anything of it is read, and a stranger's records are candidates."""

import json
from pathlib import Path

import db_samples as samples
import pytest
from commands import flashtune
from test_db_merge import one

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem
from flashtune.db import library, signature
from flashtune.db.library import Library
from flashtune.db.merging import add, merge
from flashtune.db.preference import UNRACED
from flashtune.db.signature import bundle_path, check_signature
from flashtune.templates import BITS, unservable

pytest.importorskip("sigstore")
from sigstore_here import ISSUER, Sigstore

ANN, BOB = "ann@here.test", "https://here.test/bob/.github/workflows/tune.yml@refs/heads/main"


@pytest.fixture(scope="module")
def here() -> Sigstore:
    return Sigstore()


@pytest.fixture
def trusted(here: Sigstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that trust the Sigstore of this process, by which Ann signs."""
    path = tmp_path / "trust.json"
    path.write_text(here.trust_config())
    monkeypatch.setattr(signature, "_signer", lambda config: here.signing(ANN))
    return ["--trust-config", str(path)]


@pytest.fixture
def signed(database: Path, trusted: list[str], tmp_path: Path) -> Path:
    """An export that Ann signed."""
    path = tmp_path / "tuned.sqlite"
    done = flashtune("export", str(path), "--db", str(database), "--sign", "--licence", "Apache-2.0", *trusted, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["signature"] == str(bundle_path(path)) == f"{path}.sigstore.json"
    return path


def test_the_signer_of_an_export_is_known_and_nobody_else(signed: Path, trusted: list[str]) -> None:
    def said(*words: str) -> tuple[int, str]:
        done = flashtune("verify", "--db", str(signed), *words, *trusted)
        return done.exit_code, done.output

    assert said("--identity", ANN) == (0, f"{signed} is what {ANN} signed; its kernels aren't checked by this\n")
    assert said("--identity", ANN, "--issuer", ISSUER)[0] == 0
    for words in (("--identity", BOB), ("--identity", ANN, "--issuer", "https://elsewhere.test")):
        code, text = said(*words)
        assert code == 3 and f"{signed} isn't what {words[1]} signed" in text.replace("\n", " ") and "Traceback" not in text


@pytest.mark.parametrize(
    "fault", ["a byte", "another signature", "another authority", "no bundle", "no signature", "a huge bundle", "nonsense", "a deep bundle"]
)
def test_what_was_changed_is_refused_in_a_sentence_and_is_never_opened(
    fault: str, signed: Path, here: Sigstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, config = bundle_path(signed), tmp_path / "trust.json"
    held = json.loads(bundle.read_text())
    match fault:
        case "a byte":
            data = bytearray(signed.read_bytes())
            data[-1] ^= 1
            signed.write_bytes(data)
        case "another signature":
            bundle.write_text(here.signer(ANN).sign_artifact(b"another file").to_json())
        case "another authority":
            bundle.write_text(Sigstore().signer(ANN).sign_artifact(signed.read_bytes()).to_json())
        case "no bundle":
            bundle.unlink()
        case "no signature":
            bundle.write_text(json.dumps(held | {"messageSignature": None}))
        case "a huge bundle":
            bundle.write_text(" " * (signature.MOST_BYTES + 1))
        case "a deep bundle":
            bundle.write_text("[" * 200_000)
        case "nonsense":
            held["verificationMaterial"]["certificate"]["rawBytes"] = "AAAA"
            bundle.write_text(json.dumps(held))
    monkeypatch.setattr(library, "Library", None)
    with pytest.raises(DatabaseError, match=r"(isn't what|is no signature|there is no).*: .*") as caught:
        check_signature(signed, ANN, config=config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_the_public_keys_that_came_with_the_package_trust_no_other_authority(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sigstore.errors import TUFError
    from sigstore.models import ClientTrustConfig

    public = ClientTrustConfig.production

    def offline(offline: bool = False) -> ClientTrustConfig:
        if not offline:
            raise TUFError("no network")
        return public(offline=True)

    monkeypatch.setattr(ClientTrustConfig, "production", offline)
    with pytest.raises(DatabaseError, match=r"isn't what ann@here\.test signed"):
        check_signature(signed, ANN)


def test_without_the_package_or_the_service_signing_says_so_and_the_rest_goes_on(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public Sigstore can't be reached from a test."""

    def unreachable(config: Path | None) -> object:
        raise ConnectionError("no route to the service")

    monkeypatch.setattr(signature, "_signer", unreachable)
    done = flashtune("export", str(tmp_path / "a.sqlite"), "--db", str(database), "--sign")
    assert done.exit_code == 4 and "can't be signed (no route to the service): see that Sigstore" in done.output.replace("\n", " ")
    assert flashtune("export", str(tmp_path / "b.sqlite"), "--db", str(database)).exit_code == 0
    bundle_path(tmp_path / "b.sqlite").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "sigstore", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install sigstore"):
        check_signature(tmp_path / "b.sqlite", ANN)


def test_a_file_never_stands_beside_the_signature_of_another(signed: Path, database: Path, trusted: list[str]) -> None:
    for words in (["export", str(signed), "--db", str(database)], ["merge", str(database), "--out", str(signed)]):
        done = flashtune(*words, "--licence", "MIT", "--force")
        assert done.exit_code == 2 and "the signature of another file" in done.output.replace("\n", " ")
    anew = flashtune("export", str(signed), "--db", str(database), "--licence", "MIT", "--force", "--sign", *trusted)
    assert anew.exit_code == 0 and flashtune("verify", "--db", str(signed), "--identity", ANN, *trusted).exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verify", "--identity", ANN], "name the file with --db"),
        (["verify", "--identity", ANN, "--requalify"], "signature alone"),
        (["verify", "--issuer", ISSUER], "give --identity"),
        (["verify", "--db", "postgresql://host/db", "--identity", ANN], "on a server has no signature"),
        (["export", "a.sqlite", "--trust-config", "a.json"], "give --sign"),
        (["export", "--hub", "a", "--sign"], "--sign is for databases"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], says: str) -> None:
    done = flashtune(*words)
    assert done.exit_code == 2 and says in done.output.replace("\n", " ")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """One's own database and a stranger's, which says of each of its kernels that it is the fastest."""
    own = samples.write(tmp_path / "own.sqlite", (one("mine", 1024, 60.0), one("both", 2048, 50.0)))
    says = one("theirs", 1024, 20.0), one("both", 2048, 20.0), one("only", 4096, 90.0), one("guess", 8192, 9.0, None, source="predicted")
    return own, samples.write(tmp_path / "stranger.sqlite", says)


def test_a_strangers_records_are_candidates_and_serve_nothing(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "all.sqlite"
    done = flashtune("merge", *map(str, two), "--out", str(out), "--trust", str(two[0]), "--json")
    assert done.exit_code == 0, done.output
    assert [row["variant_id"] for row in json.loads(done.stdout)["candidates"]] == ["theirs", "only"]
    found = {record.problem.n_q: record for record in Library.of(out).records(passed_over=unservable)}
    assert {n: record.outcome.variant_id for n, record in found.items()} == {1024: "mine", 2048: "both", 4096: "only"}
    assert found[2048].median_us == 50.0 and [n for n, record in found.items() if record.refuted == UNRACED] == [4096]
    # They stay what they are through further merges and additions, and a small file to ship leaves them out.
    again = merge([out], tmp_path / "again.sqlite", passed_over=unservable, bits=BITS)
    assert [record.outcome.variant_id for record in again.candidates] == ["theirs", "only"]
    more = add([], out, passed_over=unservable, bits=BITS)
    assert [record.outcome.variant_id for record in more.candidates] == ["theirs", "only"]
    assert flashtune("export", str(tmp_path / "small.sqlite"), "--db", str(out)).exit_code == 0
    assert [record.outcome.variant_id for record in Library.of(tmp_path / "small.sqlite").winners()] == ["mine", "both"]


def test_who_signed_a_database_is_trusted_by_name(two: tuple[Path, Path], trusted: list[str], here: Sigstore, tmp_path: Path) -> None:
    own, other = map(str, two)
    bundle_path(two[1]).write_text(here.signer(ANN).sign_artifact(two[1].read_bytes()).to_json())

    def candidates(*words: str) -> list[str]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite"
        done = flashtune("merge", own, other, "--out", str(out), *words, *trusted, "--json")
        assert done.exit_code == 0, done.output
        return [row["variant_id"] for row in json.loads(done.stdout)["candidates"]]

    assert candidates("--trust", own, "--trust", ANN) == []
    assert candidates("--trust", ANN) == ["mine"], "who trusts Ann alone has one's own raced"
    assert candidates() == [], "without a word of trust all are alike"
    refused = flashtune("merge", own, other, "--out", str(tmp_path / "x.sqlite"), "--trust", own, "--trust", BOB, *trusted)
    assert refused.exit_code == 2 and f"--trust {BOB} names none of the databases" in refused.output.replace("\n", " ")
    two[1].write_bytes(two[1].read_bytes() + b"\0" * 4096)
    refused = flashtune("merge", own, other, "--out", str(tmp_path / "y.sqlite"), "--trust", own, "--trust", ANN, *trusted)
    assert refused.exit_code == 2 and "a stranger's: " in refused.output and "isn't what" in refused.output.replace("\n", " ")


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_writes_that_nobody_signed_lie_beside_no_signed_file(signed: Path, trusted: list[str], suffix: str) -> None:
    beside = signed.with_name(signed.name + suffix)
    beside.write_bytes(b"somebody else's records")
    done = flashtune("verify", "--db", str(signed), "--identity", ANN, *trusted)
    assert done.exit_code == 3 and "which nobody signed" in done.output and beside.name in done.output.replace("\n", "")
    with pytest.raises(DatabaseError, match="has unfinished writes in "):
        check_signature(signed, ANN, config=Path(trusted[1]))
