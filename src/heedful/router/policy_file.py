"""From a policy file to a Policy, every name and condition checked: one that loads can be followed.

policy = load_policy(Path("policy.yaml"))
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heedful.decide.ask import question_from
from heedful.decide.http_client import Endpoint
from heedful.decide.question import Choice, Question, Score, checked_questions
from heedful.errors import BadParameter, PolicyError, UsageError
from heedful.router.breaker import BreakerLimits
from heedful.router.expression import Condition, parse
from heedful.router.patterns import compiled
from heedful.router.policy import (
    CALIBRATED,
    KINDS,
    Constraint,
    Counterfactual,
    DeciderSpec,
    Decision,
    Draft,
    LedgerSpec,
    LocalSpec,
    McpSpec,
    OpenAISpec,
    Policy,
    Route,
    Rule,
    Stick,
    TargetSpec,
)
from heedful.router.policy_text import Section, Tree, read_tree
from heedful.router.signals import SIGNALS
from heedful.router.template import Template, parsed
from heedful.router.verify import check_from_json

VERSION = 1
LONGEST_S = 3_600.0
MOST_TOKENS = 1 << 31
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def load_policy(path: Path) -> Policy:
    """Raises PolicyError, which names line and key."""
    tree = read_tree(path)
    return _Reader(path, tree).policy()


class _Reader:
    def __init__(self, path: Path, tree: Tree) -> None:
        self._path = path
        self._tree = tree
        self._root = Section(tree)
        self._names: tuple[str, ...] = ()
        self._targets: dict[str, TargetSpec] = {}

    def policy(self) -> Policy:
        root = self._root
        if root.whole("version", None, least=1, most=1_000_000) != VERSION:
            raise root.wrong("version", f"must be {VERSION}: that is what this heedful reads")
        self._read_targets()
        patterns = self._patterns()
        about_requests = {**SIGNALS, **dict.fromkeys((f"has_{name}" for name in patterns), "bool")}
        decision = self._decision()
        about_answers = {**about_requests, **_answer_names(decision.questions if decision else ())}
        rules = tuple(self._rule(one, about_requests) for one in root.sections("rules"))
        self._check_given(rules, decision)
        policy = Policy(
            path=self._path,
            sha256=policy_sha256(self._tree.value),
            targets=dict(self._targets),
            default=self._target(root, "default"),
            patterns=patterns,
            constraints=tuple(self._constraint(one, about_requests) for one in root.sections("constraints")),
            rules=rules,
            decision=decision,
            routes=tuple(self._route(one, about_answers, decision) for one in root.sections("routes")),
            fallbacks=self._fallbacks(),
            stick=self._stick(),
            counterfactual=self._counterfactual(),
            ledger=self._ledger(),
        )
        root.done()
        return policy

    # ---- Targets --------------------------------------------------------------------------------------------------

    def _read_targets(self) -> None:
        section = self._root.section("targets")
        for name in section.keys:
            if not _NAME.fullmatch(name):
                raise section.wrong(name, f"{name!r:.60} is no name: letters, digits, - and _, at most 40")
        self._names = tuple(section.keys)
        if not self._names:
            raise self._root.wrong("targets", "has none", "Name at least one.")
        for name in self._names:
            one = section.section(name)
            if "api_key" in one.keys:
                remedy = "Keys come from the environment: api_key_env: NAME."
                raise one.wrong("api_key", "must not stand in a file", remedy)
            kind = one.text("kind", one_of=KINDS)
            head = {"name": name, "kind": kind, "draft": self._draft(name, one)}
            self._targets[name] = getattr(self, f"_{kind}")(head, one)
            one.done()

    def _local(self, head: Mapping[str, Any], one: Section) -> TargetSpec:
        return LocalSpec(**head, model=one.text("model"), max_tokens=_max_tokens(one))

    def _decider(self, head: Mapping[str, Any], one: Section) -> TargetSpec:
        question = self._question(one, "question", one.any("question"), name="label")
        if not isinstance(question, Choice):
            raise one.wrong("question", "must be a choice: its options are what can be answered")
        say: dict[str, str] = {}
        if one.has("say"):
            texts = one.section("say")
            say = {label: texts.text(label) for label in texts.keys}
            if strange := [label for label in say if label not in question.labels]:
                raise one.wrong("say", f"has {strange[0]!r:.40}, which is no option of the question")
        return DeciderSpec(**head, model=one.text("model"), question=question, say=say)

    def _openai(self, head: Mapping[str, Any], one: Section) -> TargetSpec:
        endpoints = self._endpoints(one) if one.has("endpoints") else ()
        url = endpoints[0] if endpoints else self._url(one, "base_url", one.text("base_url"))
        variable = one.maybe_text("api_key_env")
        if variable is not None and not _WORD.fullmatch(variable):
            raise one.wrong("api_key_env", "must be the name of a variable, not the key itself")
        return OpenAISpec(
            **head,
            base_url=url,
            endpoints=endpoints,
            model=one.text("model"),
            api_key_env=variable,
            timeout_s=one.number("timeout_s", 60.0, least=0.01, most=LONGEST_S),
            retries=one.whole("retries", 2, least=0, most=10),
            breaker=_breaker(one),
            max_tokens=_max_tokens(one),
        )

    def _endpoints(self, one: Section) -> tuple[str, ...]:
        if one.has("base_url"):
            raise one.wrong("endpoints", "does not go with base_url", "Put that URL among the endpoints.")
        urls = one.texts("endpoints")
        if not urls:
            raise one.wrong("endpoints", "has none", "Name at least one URL.")
        if len(set(urls)) < len(urls):
            raise one.wrong("endpoints", "names one of them twice")
        return tuple(self._url(one, "endpoints", url) for url in urls)

    def _url(self, one: Section, key: str, url: str) -> str:
        if not VARIABLE.search(url):
            try:
                Endpoint.parse(url, "/chat/completions")
            except BadParameter as problem:
                raise one.wrong(key, problem.message.partition(": ")[2], problem.remedy) from None
        return url

    def _mcp(self, head: Mapping[str, Any], one: Section) -> TargetSpec:
        arguments: dict[str, Any] | None = None
        if one.has("arguments"):
            section = one.section("arguments")
            values = {name: section.any(name) for name in section.keys}
            arguments = {
                name: _template(section, name) if isinstance(value, str) else value for name, value in values.items()
            }
        return McpSpec(
            **head,
            config=self._file(one.text("config")),
            server=one.text("server"),
            tool=one.text("tool"),
            arguments=arguments,
            answer=_template(one, "answer") if one.has("answer") else None,
            timeout_s=one.number("timeout_s", 30.0, least=0.01, most=LONGEST_S),
        )

    def _check_given(self, rules: tuple[Rule, ...], decision: Decision | None) -> None:
        """That what the arguments of tools are filled from can be there."""
        asked = [question.name for question in decision.questions] if decision else []
        for target in self._targets.values():
            if not isinstance(target, McpSpec):
                continue
            groups = [name for rule in rules if rule.to == target.name and rule.match for name in rule.match.groupindex]
            known = {"text", *groups, *asked}
            for name, value in (target.arguments or {}).items():
                for place in value.names if isinstance(value, Template) else ():
                    if place not in known:
                        section = self._root.section("targets").section(target.name).section("arguments")
                        there = f"There are: {', '.join(sorted(known))}."
                        remedy = f"Name a group of a rule's match (?P<{place}>…), or a question. {there}"
                        raise section.wrong(name, f"has {{{place}}}, which nothing fills", remedy)

    def _draft(self, name: str, one: Section) -> Draft | None:
        has_check, has_other = one.has("verify"), one.has("escalate")
        if not has_check and not has_other:
            return None
        if not has_check or not has_other:
            raise one.wrong(None, "must have both verify and escalate, or neither")
        try:
            check = check_from_json(one.any("verify"), one.where("verify"))
        except BadParameter as problem:
            raise PolicyError(problem.field, problem.message.partition(": ")[2], problem.remedy) from None
        escalate = self._target(one, "escalate")
        if escalate == name:
            raise one.wrong("escalate", "must be another target")
        return Draft(check, escalate)

    # ---- Who goes where -------------------------------------------------------------------------------------------

    def _target(self, section: Section, key: str) -> str:
        name = section.text(key)
        if name not in self._names:
            near = get_close_matches(name, self._names, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Targets are: {', '.join(self._names)}."
            raise section.wrong(key, f"{name!r:.40} is no target", hint)
        return name

    def _patterns(self) -> dict[str, re.Pattern[str]]:
        if not self._root.has("patterns"):
            return {}
        section = self._root.section("patterns")
        for name in section.keys:
            if not _WORD.fullmatch(name) or f"has_{name}" in SIGNALS:
                raise section.wrong(name, f"cannot be called that: has_{name} must be a new word")
        return {name: compiled(section.text(name), section.where(name)) for name in section.keys}

    def _constraint(self, one: Section, known: Mapping[str, str]) -> Constraint:
        never = one.texts("never")
        for name in never:
            if name not in self._names:
                raise one.wrong("never", f"{name!r:.40} is no target", f"Targets are: {', '.join(self._names)}.")
        if set(never) == set(self._names):
            raise one.wrong("never", "forbids every target: nobody could answer")
        constraint = Constraint(_condition(one, "if", known), never)
        one.done()
        return constraint

    def _rule(self, one: Section, known: Mapping[str, str]) -> Rule:
        match = compiled(one.text("match"), one.where("match")) if one.has("match") else None
        condition = _condition(one, "when", known) if one.has("when") else None
        if match is None and condition is None:
            raise one.wrong(None, "has neither match nor when")
        rule = Rule(match, condition, self._target(one, "to"), _max_tokens(one))
        one.done()
        return rule

    def _decision(self) -> Decision | None:
        if not self._root.has("decision"):
            return None
        one = self._root.section("decision")
        asked = one.section("questions")
        for name in asked.keys:
            if not _WORD.fullmatch(name) or name in SIGNALS or name.startswith(("has_", "p_")):
                raise asked.wrong(name, "is no name for a question", "It must be a word of its own in conditions.")
        questions = checked_questions(self._question(asked, name, asked.any(name), name=name) for name in asked.keys)
        decision = Decision(
            model=one.maybe_text("model"),
            questions=questions,
            timeout_s=one.number("timeout_s", 1.0, least=0.001, most=60.0),
            breaker=_breaker(one),
            calibration=self._file(one.text("calibration")) if one.has("calibration") else None,
        )
        one.done()
        return decision

    def _question(self, section: Section, key: str, asked: Any, *, name: str) -> Question:
        if asked is None:
            raise section.wrong(None, f"has no {key}")
        try:
            return question_from(name, asked)
        except UsageError as problem:
            raise section.wrong(key, problem.message, problem.remedy) from None

    def _route(self, one: Section, known: Mapping[str, str], decision: Decision | None) -> Route:
        questions = decision.questions if decision else ()
        condition = _condition(one, "when", known, questions)
        min_p: float | str | None = None
        if one.any("min_p") == CALIBRATED:
            min_p = CALIBRATED
            if decision is None or decision.calibration is None:
                remedy = "Name a file there; heedful route calibrate writes it."
                raise one.wrong("min_p", "is calibrated, and decision has no calibration", remedy)
        elif one.has("min_p"):
            min_p = one.number("min_p", None, least=0.0, most=1.0)
        if min_p is not None and not questions_of(condition, questions):
            raise one.wrong("min_p", "means nothing: the condition asks no question of the decision")
        route = Route(
            to=self._target(one, "to"),
            condition=condition,
            min_p=min_p,
            otherwise=self._target(one, "else") if one.has("else") else None,
            max_tokens=_max_tokens(one),
        )
        if route.otherwise is not None and min_p is None:
            raise one.wrong("else", "means nothing without min_p")
        one.done()
        return route

    def _fallbacks(self) -> dict[str, str]:
        if not self._root.has("fallbacks"):
            return {}
        section = self._root.section("fallbacks")
        found = {}
        for name in section.keys:
            if name not in self._names:
                raise section.wrong(name, "is no target", f"Targets are: {', '.join(self._names)}.")
            found[name] = self._target(section, name)
            if found[name] == name:
                raise section.wrong(name, "cannot stand in for itself")
        return found

    def _stick(self) -> Stick:
        if not self._root.has("stick"):
            return Stick()
        one = self._root.section("stick")
        stick = Stick(
            tool_loop=one.flag("tool_loop", True),
            no_downgrade_above_tokens=one.maybe_whole("no_downgrade_above_tokens", least=0, most=MOST_TOKENS),
            turn_ttl_s=one.number("turn_ttl_s", 600.0, least=1.0, most=86_400.0),
        )
        one.done()
        return stick

    def _counterfactual(self) -> Counterfactual | None:
        if not self._root.has("counterfactual"):
            return None
        one = self._root.section("counterfactual")
        share = one.number("share", None, least=0.0, most=1.0)
        targets = one.texts("targets")
        for name in targets:
            if name not in self._names:
                raise one.wrong("targets", f"{name!r:.40} is no target", f"Targets are: {', '.join(self._names)}.")
        found = Counterfactual(share, targets, one.whole("seed", 0, least=0, most=MOST_TOKENS))
        one.done()
        return found

    def _ledger(self) -> LedgerSpec | None:
        if not self._root.has("ledger"):
            return None
        one = self._root.section("ledger")
        spec = LedgerSpec(
            self._file(one.text("path")), one.text("fsync", "interval", one_of=("always", "interval", "never"))
        )
        one.done()
        return spec

    def _file(self, name: str) -> Path:
        """Beside the policy, unless it says where."""
        return (self._path.parent / Path(name).expanduser()).absolute()


def policy_sha256(value: Any) -> str:
    """Of a policy's values; key order counts only where it means something: of targets, the cheapest first."""
    ordered = {**value, "targets": list(value["targets"].items())} if isinstance(value, Mapping) else value
    text = json.dumps(ordered, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def questions_of(condition: Condition, questions: tuple[Question, ...]) -> tuple[Question, ...]:
    """Those that a condition is about."""
    return tuple(q for q in questions if q.name in condition.names or f"p_{q.name}" in condition.names)


def _answer_names(questions: tuple[Question, ...]) -> dict[str, str]:
    """What answers are called in conditions: the likeliest option, level or truth, and under p_… how likely it is."""
    found = {}
    for question in questions:
        is_choice, is_score = isinstance(question, Choice), isinstance(question, Score)
        found[question.name] = "text" if is_choice else "number" if is_score else "bool"
        found[f"p_{question.name}"] = "number"
    return found


def _condition(section: Section, key: str, known: Mapping[str, str], questions: tuple[Question, ...] = ()) -> Condition:
    options = {question.name: question.labels for question in questions if isinstance(question, Choice)}
    return parse(section.text(key), known, section.where(key), options)


def _template(section: Section, key: str) -> Template:
    try:
        return parsed(section.text(key))
    except ValueError as problem:
        raise section.wrong(key, str(problem)) from None


def _max_tokens(section: Section) -> int | None:
    return section.maybe_whole("max_tokens", least=1, most=MOST_TOKENS)


def _breaker(section: Section) -> BreakerLimits:
    if not section.has("breaker"):
        return BreakerLimits()
    one = section.section("breaker")
    limits = BreakerLimits(
        one.whole("failures", 5, least=1, most=1_000), one.number("cooldown_s", 30.0, least=0.0, most=LONGEST_S)
    )
    one.done()
    return limits
