"""A Sigstore of this process's own, for signatures without a network: an authority for certificates, its log of them, and a log of
signatures, each with a key made here. Sigstore's own client signs by it and verifies by its `trust_config`."""

import base64
import hashlib
import json
import struct
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from sigstore.models import ClientTrustConfig, TransparencyLogEntry
from sigstore.sign import Signer, SigningContext

ISSUER = "https://accounts.here.test"
_ISSUER_OID, _SCT_OID = ObjectIdentifier("1.3.6.1.4.1.57264.1.1"), ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Sigstore:
    """The authority and both logs; `signer` signs as an identity, and `trust_config` is the text of a trust configuration."""

    def __init__(self) -> None:
        self.authority, self.certificates, self.signatures = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "here"), x509.NameAttribute(NameOID.ORGANIZATION_NAME, "here")])
        self._root = (
            self._builder(self.authority.public_key(), self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key()), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def _builder(self, key: Any, name: x509.Name) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        dated = builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(minutes=10))
        return dated.serial_number(x509.random_serial_number())

    def _certificate(self, key: Any, identity: str) -> x509.Certificate:
        """A certificate of an identity, which the log of certificates has promised to hold."""
        builder = (
            self._builder(key, x509.Name([]))
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_OID, ISSUER.encode()), critical=False)
        )
        body = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        issuer, moment = hashlib.sha256(_spki(self.authority)).digest(), int(time.time() * 1000)
        entry = struct.pack("!BBQH32s", 0, 0, moment, 1, issuer) + len(body).to_bytes(3, "big") + body + struct.pack("!H", 0)
        signature = self.certificates.sign(entry, ec.ECDSA(hashes.SHA256()))
        log = hashlib.sha256(_spki(self.certificates)).digest()
        stamp = struct.pack("!B32sQHBBH", 0, log, moment, 0, 4, 3, len(signature)) + signature
        held = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        # In DER the length of so few bytes is one.
        promised = x509.UnrecognizedExtension(_SCT_OID, b"\x04" + bytes([len(held)]) + held)
        return builder.add_extension(promised, critical=False).sign(self.authority, hashes.SHA256())

    def _entry(self, request: Any) -> TransparencyLogEntry:
        """A signature in the log, which has no other."""
        body = base64.b64encode(rfc8785.dumps(request))
        log = hashlib.sha256(_spki(self.signatures)).digest()
        entry: dict[str, Any] = {"body": body.decode(), "integratedTime": int(time.time()), "logID": log.hex(), "logIndex": 0}
        promise = self.signatures.sign(rfc8785.dumps(entry), ec.ECDSA(hashes.SHA256()))
        root = hashlib.sha256(b"\0" + base64.b64decode(body)).digest()
        note = f"here\n1\n{_text(root)}\n"
        signed = log[:4] + self.signatures.sign(note.encode(), ec.ECDSA(hashes.SHA256()))
        proof = {"logIndex": 0, "rootHash": root.hex(), "treeSize": 1, "hashes": [], "checkpoint": f"{note}\n\u2014 here {_text(signed)}\n"}
        verification = {"inclusionProof": proof, "signedEntryTimestamp": _text(promise)}
        return TransparencyLogEntry._from_v1_response({"1": {**entry, "verification": verification}})

    def signer(self, identity: str) -> Signer:
        """Sigstore's signer, whose certificates and log entries are made here."""
        trust = ClientTrustConfig.from_json(self.trust_config())
        context = SigningContext.from_trust_config(trust)

        def issued(request: x509.CertificateSigningRequest, _: object) -> Any:
            return SimpleNamespace(cert=self._certificate(request.public_key(), identity), chain=[self._root])

        context._fulcio = SimpleNamespace(signing_cert=SimpleNamespace(post=issued))  # type: ignore[assignment]
        context._rekor.create_entry = lambda request: self._entry(json.loads(json.dumps(request)))  # type: ignore[method-assign]
        return Signer(SimpleNamespace(in_validity_period=lambda: True), context)  # type: ignore[arg-type]

    def signing(self, identity: str) -> AbstractContextManager[Signer]:
        """The signer as the context in which sigstore gives it."""
        return nullcontext(self.signer(identity))

    def trust_config(self) -> str:
        """Trust in this authority and these logs alone."""
        since = {"start": "2020-01-01T00:00:00Z"}

        def log(key: ec.EllipticCurvePrivateKey, url: str) -> dict[str, Any]:
            public = {"rawBytes": _text(_spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since}
            keyed = {"keyId": _text(hashlib.sha256(_spki(key)).digest())}
            return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": keyed}

        def service(url: str) -> dict[str, Any]:
            return {"url": url, "majorApiVersion": 1, "validFor": since, "operator": "here"}

        chain = {"certificates": [{"rawBytes": _text(self._root.public_bytes(Encoding.DER))}]}
        subject = {"organization": "here", "commonName": "here"}
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.signatures, "https://rekor.here.test")],
            "certificateAuthorities": [{"subject": subject, "uri": "https://fulcio.here.test", "certChain": chain, "validFor": since}],
            "ctlogs": [log(self.certificates, "https://ctfe.here.test")],
            "timestampAuthorities": [],
        }
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service("https://fulcio.here.test")],
            "oidcUrls": [service(ISSUER)],
            "rekorTlogUrls": [service("https://rekor.here.test")],
            "tsaUrls": [],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaConfig": {"selector": "ANY"},
        }
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        return json.dumps({"mediaType": kind, "trustedRoot": root, "signingConfig": signing})


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    names += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
