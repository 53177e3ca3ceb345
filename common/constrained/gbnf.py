"""Grammars in the notation of llama.cpp (GBNF), written in that of Lark.

In Lark's notation, a rule in capitals, a text in quotes and a regular expression are *terminals*. The compiler's
lexer takes the longest terminal that it finds, and never a shorter one. In GBNF, all ways to read a text count:

```text
root ::= word "s"          "cats"   GBNF: word = cat, s       longest terminal: WORD = cats, and no s
word ::= [a-z]+
```

So a rule of characters becomes a terminal only if the longest one is always right: if no character that could make
it longer may also come after it. Otherwise, each character of the grammar becomes a terminal of its own. This is
exact, but masks then take longer.

`common.constrained.trial` runs as a script and imports this module, so it must not import modules of this package.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    resolve,
)

#: One character, or its escape.
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|.", re.DOTALL)

_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}


def to_lark(text: str) -> str:
    """Return a grammar in the notation of Lark. Raises ValueError: it is malformed."""
    try:
        rules = GrammarParser().parse(text)
        renamed = {name: _plain(name, place) for place, name in enumerate(rules)}
        for rule in rules.values():
            rule.name, rule.comment = renamed[rule.name], ""
            for node in _below(rule):
                if isinstance(node, RuleRefNode):
                    node.name = renamed.get(node.name, node.name)  # `resolve` refuses unknown names
                elif isinstance(node, RegexNode):
                    node.rx = r"(.|\n)" if node.rx == "." else re.sub("[&~]", r"\\\g<0>", node.rx)
        rules = {rule.name: rule for rule in rules.values()}
        resolve(rules)
        is_exact = _Lexer(list(rules.values())).is_exact()
        for rule in rules.values():
            rule.name = rule.name if is_exact else rule.name.lower()
            for node in _below(rule):
                if not is_exact:
                    _split(node)
                if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
                    node.node = AlternativeNode([node.node])  # which is written in brackets
    except (Exception, RecursionError) as error:  # the library raises some that are nothing more
        raise ValueError(f"not read as GBNF: {error}") from None
    return "\n".join(map(str, sorted(rules.values(), key=lambda rule: rule.order)))


def _plain(name: str, place: int) -> str:
    """Return a name for Lark that no other rule has."""
    return "root" if name == "root" else f"{re.sub(r'[^a-z0-9]', '_', name.lower())}_r{place}"


def _below(node: ASTNode) -> Iterator[ASTNode]:
    waiting = [node]
    while waiting:
        yield (each := waiting.pop())
        waiting += each.children()


def _split(node: ASTNode) -> None:
    """Split the texts right below a node into characters."""

    def split(each: ASTNode) -> ASTNode:
        if isinstance(each, LiteralNode) and len(characters := _CHARACTER.findall(each.value)) > 1:
            return SequenceNode([LiteralNode(character) for character in characters])
        return each

    match node:
        case RuleNode():
            node.alternatives = split(node.alternatives)
        case RepetitionNode():
            node.node = split(node.node)
        case SequenceNode():
            node.nodes = [split(each) for each in node.nodes]
        case AlternativeNode():
            node.alternatives = [split(each) for each in node.alternatives]


def _named(node: RuleRefNode) -> RuleNode:
    assert node.target is not None, "resolved"
    return node.target


def _code(character: str) -> int:
    """Return the code point of a character or its escape."""
    if character.startswith("\\x"):
        return int(character[2:], 16)
    return ord(_ESCAPES.get(character, character[-1]))


def _ranges(node: LiteralNode | RegexNode) -> list[tuple[int, int]]:
    """Return the code points of a node's characters, as ranges from the first to behind the last."""
    if isinstance(node, LiteralNode):
        return [(code, code + 1) for code in map(_code, _CHARACTER.findall(node.value))]
    if not node.rx.startswith("["):
        return [(0, 0x110000)]
    inside = _CHARACTER.findall(node.rx[1:-1])
    negated = inside[:1] == ["^"]
    found, place = [], int(negated)
    while place < len(inside):
        is_range = inside[place + 1 : place + 2] == ["-"] and place + 2 < len(inside)
        last = inside[place + 2] if is_range else inside[place]
        found.append((_code(inside[place]), _code(last) + 1))
        place += 3 if is_range else 1
    if not negated:
        return found
    gaps, end = [], 0
    for first, behind in sorted(found):
        gaps.append((end, first))
        end = max(end, behind)
    return [*gaps, (end, 0x110000)]


class _Lexer:
    """Finds whether a lexer that takes the longest terminal reads a grammar as GBNF means it.

    Sets of characters are bits: one for each range of characters that the grammar does not tell apart.
    """

    def __init__(self, rules: list[RuleNode]) -> None:
        self._rules = rules
        nodes = [each for rule in rules for each in _below(rule) if isinstance(each, LiteralNode | RegexNode)]
        self._ends = sorted({end for node in nodes for pair in _ranges(node) for end in pair})
        self._nullable: dict[str, bool] = {rule.name: False for rule in rules}
        self._first: dict[str, int] = {rule.name: 0 for rule in rules}
        self._follow: dict[str, int] = {rule.name: 0 for rule in rules}
        self._insides: dict[str, int] = {}
        self._longers: dict[str, int] = {}
        self._terminals: dict[str, tuple[ASTNode, int]] = {}  # each with the characters that may follow it

    def is_exact(self) -> bool:
        """Return whether no terminal can be longer by a character that may also come after it.

        First sets grow until nothing changes, then those of the characters that may follow: a fixed point each.
        """
        before: object = None
        while before != (before := (dict(self._nullable), dict(self._first))):
            for rule in reversed(self._rules):  # most rules refer to later ones
                self._nullable[rule.name] = self._is_nullable(rule.alternatives)
                self._first[rule.name] = self._begins(rule.alternatives)
        while before != (before := (dict(self._follow), {k: v for k, (_, v) in self._terminals.items()})):
            for rule in self._rules:
                if not rule.rule_is_terminal:
                    self._place(rule.alternatives, self._follow[rule.name])
        # For each character: the characters that terminals have behind it, and how many terminals begin with it.
        tails, counts = [0] * len(self._ends), [0] * len(self._ends)
        for node, _ in self._terminals.values():
            for place in self._places(self._begins(node)):
                tails[place] |= self._behind(node)
                counts[place] += 1
        for node, follow in self._terminals.values():
            longer = self._longer(node)
            for place in self._places(self._begins(node)):
                longer |= tails[place] if counts[place] > 1 else 0
            if longer & follow:
                return False
        return True

    def _places(self, characters: int) -> Iterator[int]:
        return (place for place in range(len(self._ends)) if characters >> place & 1)

    def _bits(self, ranges: list[tuple[int, int]]) -> int:
        found = 0
        for first, behind in ranges:
            found |= (1 << bisect.bisect_left(self._ends, behind)) - (
                1 << bisect.bisect_left(self._ends, first)
            )
        return found

    def _is_nullable(self, node: ASTNode) -> bool:
        match node:
            case LiteralNode():
                return not node.value
            case RegexNode():
                return False
            case RuleRefNode():
                return self._nullable[_named(node).name]
            case RepetitionNode():
                return node.min_times == 0 or self._is_nullable(node.node)
            case SequenceNode():
                return all(map(self._is_nullable, node.nodes))
        return any(map(self._is_nullable, node.children()))

    def _begins(self, node: ASTNode) -> int:
        """Return the characters with which a node's texts begin."""
        if isinstance(node, LiteralNode | RegexNode):
            ranges = _ranges(node)
            return self._bits(ranges[:1] if isinstance(node, LiteralNode) else ranges)
        if isinstance(node, RuleRefNode):
            return self._first[_named(node).name]
        found = 0
        for each in node.children():
            found |= self._begins(each)
            if isinstance(node, SequenceNode) and not self._is_nullable(each):
                break
        return found

    def _inside(self, node: ASTNode) -> int:
        """Return all characters of a node's texts."""
        if isinstance(node, LiteralNode | RegexNode):
            return self._bits(_ranges(node))
        if isinstance(node, RuleRefNode):
            return self._of_rule(self._insides, _named(node), self._inside)
        found = 0
        for each in node.children():
            found |= self._inside(each)
        return found

    @staticmethod
    def _of_rule(known: dict[str, int], rule: RuleNode, find: Callable[[ASTNode], int]) -> int:
        if rule.name not in known:
            known[rule.name] = find(rule.alternatives)
        return known[rule.name]

    def _behind(self, node: ASTNode) -> int:
        """Return the characters of a terminal's texts, except for the first character of each."""
        if isinstance(node, LiteralNode | RegexNode):
            return self._bits(_ranges(node)[1:]) if isinstance(node, LiteralNode) else 0
        return self._inside(node)

    def _longer(self, node: ASTNode) -> int:
        """Return the characters, and perhaps others, that may come after a text of a node so that a longer text of
        the node may begin so."""
        match node:
            case LiteralNode() | RegexNode():
                return 0
            case RuleRefNode():
                return self._of_rule(self._longers, _named(node), self._longer)
            case RepetitionNode():
                found, again = self._longer(node.node), self._begins(node.node)
                is_fixed = node.max_times == node.min_times and not self._is_nullable(node.node)
                return self._inside(node) if found & again else found if is_fixed else found | again
            case SequenceNode():
                found = 0
                for each in node.nodes:
                    begins = self._begins(each)
                    if found & begins:
                        return self._inside(node)
                    found = self._longer(each) | (found | begins if self._is_nullable(each) else 0)
                return found
        found = begun = 0
        for each in node.children():
            begins = self._begins(each)
            if begun & begins:
                return self._inside(node)
            begun |= begins
            found |= self._longer(each)
        return found | (begun if self._is_nullable(node) else 0)

    def _place(self, node: ASTNode, after: int) -> None:
        """Add the characters `after`, which may follow a node, to the rules and terminals at its end, and so on."""
        match node:
            case RuleRefNode() if not node.is_terminal():
                self._follow[_named(node).name] |= after
            case LiteralNode() | RegexNode() | RuleRefNode():
                known = self._terminals.get(str(node), (node, 0))[1]
                self._terminals[str(node)] = (node, known | after)
            case RepetitionNode():
                self._place(node.node, after if node.max_times == 1 else after | self._begins(node.node))
            case SequenceNode():
                for each in reversed(node.nodes):
                    self._place(each, after)
                    after = self._begins(each) | (after if self._is_nullable(each) else 0)
            case _:
                for each in node.children():
                    self._place(each, after)
