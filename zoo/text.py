"""Writes the text that the zoo's models are trained on: little stories and conversations, from a grammar.

A story is a small simulation. A plot moves people and things and writes sentences about the moves, and
:class:`Teller` keeps track of where people are and who holds what. So a lantern that is found in chapter one is in
the right hands in chapter three, and each question about the story has one answer. Everything is drawn from one
``random.Random``: the same seed writes the same text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# --------------------------------------------------------------------------------------------------
# The world: its people, tools and places.


@dataclass(frozen=True)
class Kind:
    """A kind of animal or person, with facts that hold in every story."""

    noun: str
    home: str
    food: str
    emoji: str


@dataclass(frozen=True)
class Person:
    """A person in a story. A name has the same pronoun in every story, so that a model can learn the pronoun."""

    name: str
    she: bool
    kind: Kind
    trait: str

    @property
    def subject(self) -> str:
        """The person as a sentence's subject: ``she`` or ``he``."""
        return "she" if self.she else "he"

    @property
    def object(self) -> str:
        """The person as a sentence's object: ``her`` or ``him``."""
        return "her" if self.she else "him"

    @property
    def possessive(self) -> str:
        """The word before a thing that belongs to the person: ``her`` or ``his``."""
        return "her" if self.she else "his"


@dataclass(frozen=True)
class Tool:
    """A thing that mends one kind of trouble.

    In ``trouble`` and ``fix``, ``{a}`` stands for the person who helps, and ``{b}`` for the person in trouble.
    """

    noun: str
    use: str
    trouble: str
    fix: str
    emoji: str


@dataclass(frozen=True)
class Place:
    """A place in a story, and its words for two kinds of sentences: ``walked to the {noun}``, ``was {where}``."""

    noun: str
    where: str


KINDS = (
    Kind("fox", "a warm den in the forest", "berries", "🦊"),
    Kind("rabbit", "a burrow under the meadow", "carrots", "🐰"),
    Kind("bear", "a cave on the hill", "honey", "🐻"),
    Kind("owl", "an old oak tree", "seeds", "🦉"),
    Kind("mouse", "a hole in the barn", "cheese", "🐭"),
    Kind("otter", "a nest by the river", "fish", "🦦"),
    Kind("hedgehog", "a pile of leaves", "mushrooms", "🦔"),
    Kind("duck", "the reeds by the lake", "bread", "🦆"),
    Kind("squirrel", "a tall pine tree", "nuts", "🐿️"),
    Kind("cat", "a warm kitchen", "fish", "🐱"),
    Kind("gardener", "a green house", "soup", "🌻"),
    Kind("sailor", "a small ship", "rice", "⛵"),
    Kind("baker", "a little house in the village", "bread", "🥖"),
    Kind("painter", "a room full of colours", "crêpes", "🎨"),
)

SHE = ("Mia", "Zoë", "Ruby", "Ana", "Lily", "Ivy", "Nora", "Clara", "Rosa", "Chloé", "Elsa", "Inès")
HE = ("Leo", "André", "Finn", "Oskar", "Tom", "Max", "Hugo", "Pip", "Sam", "José", "Björn", "Otto")
TRAITS = ("brave", "shy", "clever", "kind", "curious", "quiet", "cheerful", "careful", "small", "sleepy")

TOOLS = (
    Tool("lantern", "see in the dark", "it was dark and {b} could not see the path",
         "{a} lit the lantern, and the path was bright again", "🔥"),
    Tool("umbrella", "stay dry in the rain", "it began to rain and {b} was getting wet",
         "{a} opened the umbrella, and they both stayed dry", "☔"),
    Tool("ladder", "reach high places", "the hat of {b} was stuck in a tall tree",
         "{a} climbed up the ladder and brought the hat down", "🎩"),
    Tool("rope", "climb out of a hole", "{b} had fallen into a deep hole",
         "{a} let down the rope and pulled {b} out", "🪢"),
    Tool("map", "find the way", "{b} was lost and did not know the way home",
         "{a} opened the map and showed {b} the way", "🧭"),
    Tool("blanket", "keep warm", "the wind was cold and {b} was shaking",
         "{a} put the blanket around {b}, and {b} was warm again", "❄️"),
    Tool("key", "open a locked door", "the door was locked and {b} could not go inside",
         "{a} turned the key, and the door opened", "🚪"),
    Tool("bell", "call somebody in the fog", "a thick fog came and {b} could see nobody",
         "{a} rang the bell, and {b} followed the sound", "🔔"),
    Tool("basket", "carry apples", "{b} had too many apples to carry",
         "{a} put the apples into the basket and carried them home", "🍎"),
    Tool("needle", "mend clothes", "the coat of {b} was torn",
         "{a} took the needle and mended the coat", "🧵"),
    Tool("shovel", "dig through the snow", "{b} could not get out because of the deep snow",
         "{a} took the shovel and dug a way through the snow", "⛄"),
    Tool("boat", "cross the water", "{b} was sitting on a rock in the water and could not swim",
         "{a} took the boat and brought {b} back to the shore", "🌊"),
)  # fmt: skip

PLACES = (
    Place("forest", "in the forest"),
    Place("river", "by the river"),
    Place("market", "at the market"),
    Place("hill", "on the hill"),
    Place("lake", "by the lake"),
    Place("garden", "in the garden"),
    Place("beach", "on the beach"),
    Place("old mill", "behind the old mill"),
    Place("café", "in front of the café"),
    Place("bridge", "under the bridge"),
    Place("barn", "in the barn"),
    Place("meadow", "in the meadow"),
)

INGREDIENTS = {"flour": "old mill", "apples": "garden", "honey": "forest", "eggs": "barn", "milk": "market"}
DISHES = ("cake", "pie", "soufflé")
WALKS = ("walked", "went", "ran", "hurried")
WEATHER = (
    "The sun was shining and the birds were singing.",
    "It was a warm day and the sky was blue.",
    "It was a grey day with many clouds.",
    "The night had been long, and now the sun came up.",
    "White snow lay on the roofs.",
)
LATER = (
    "The next day was quiet.",
    "A week went by.",
    "Then winter came.",
    "Soon it was spring again.",
    "But that was not all.",
    "Some days later something new happened.",
)
MORALS = (
    "It is good to share.",
    "A good friend is never far away.",
    "Small friends can be a big help.",
    "Being kind costs nothing.",
    "Two heads are better than one.",
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def with_article(noun: str) -> str:
    """Return a noun with its article: ``an owl``, ``a fox``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """Return the text with a capital first letter and, unless it ends in a mark already, a full stop."""
    return text[0].upper() + text[1:] + ("" if text[-1] in '.!?"' else ".")


# --------------------------------------------------------------------------------------------------
# One story.


@dataclass(frozen=True)
class Cast:
    """The people and the tool of a story. A request for the story mentions some of them."""

    hero: Person
    friend: Person
    third: Person
    tool: Tool

    @classmethod
    def draw(cls, rng: random.Random) -> "Cast":
        """Return a cast: three people with different names and kinds, and a tool."""
        kinds = rng.sample(KINDS, 3)
        names = rng.sample(SHE + HE, 3)
        people = [
            Person(name, name in SHE, kind, rng.choice(TRAITS))
            for name, kind in zip(names, kinds, strict=True)
        ]
        return cls(people[0], people[1], people[2], rng.choice(TOOLS))


@dataclass(frozen=True)
class Story:
    """A finished story and questions about it, each with its answer."""

    text: str
    cast: Cast
    questions: tuple[tuple[str, str], ...]


class Teller:
    """Writes one story, and keeps track of its facts: where each person is, and who holds each tool."""

    def __init__(self, rng: random.Random, cast: Cast) -> None:
        self.rng = rng
        self.cast = cast
        self.sentences: list[str] = []
        self.place: dict[str, Place] = {}  # by the person's name
        self.holder: dict[str, Person] = {}  # by the tool's noun
        self.facts: dict[str, str] = {}  # question: answer; a later answer replaces an earlier one
        self.introduced: set[str] = set()

    def say(self, text: str) -> None:
        """Add one sentence."""
        self.sentences.append(sentence(text))

    def elsewhere(self, *people: Person) -> Place:
        """Return a random place where none of ``people`` is."""
        taken = [self.place.get(person.name) for person in people]
        return self.rng.choice([place for place in PLACES if place not in taken])

    def mention(self, person: Person) -> str:
        """Return ``Leo the owl`` when a person first appears, and note the fact. Return ``Leo`` afterwards."""
        if person.name in self.introduced:
            return person.name
        self.introduced.add(person.name)
        self.facts[f"What is {person.name}?"] = f"{person.name} is {with_article(person.kind.noun)}."
        return f"{person.name} the {person.kind.noun}"

    def go(self, person: Person, place: Place, opening: str = "") -> None:
        """Write that a person walks to a place. Tools that the person holds move along."""
        self.say(f"{opening}{person.name} {self.rng.choice(WALKS)} to the {place.noun}")
        self.place[person.name] = place
        self.facts[f"Where did {person.name} go last?"] = f"{person.name} went to the {place.noun}."

    def meet(self, person: Person, other: Person) -> None:
        """Write that ``person`` meets ``other`` at the place where ``person`` is."""
        place = self.place[person.name]
        self.say(f"{place.where}, {person.subject} met {self.mention(other)}")
        self.place[other.name] = place

    def take(self, person: Person, tool: Tool) -> None:
        """Record that ``person`` holds ``tool`` from now on. Writes no sentence."""
        self.holder[tool.noun] = person
        self.facts[f"Who has the {tool.noun}?"] = f"{person.name} has the {tool.noun}."

    def held_by(self, person: Person) -> list[Tool]:
        """Return the tools that a person holds."""
        return [tool for tool in TOOLS if self.holder.get(tool.noun) is person]

    def new_tool(self) -> Tool:
        """Return a tool that nobody holds: the cast's own if nobody holds that, else a random one."""
        if self.cast.tool.noun not in self.holder:
            return self.cast.tool
        return self.rng.choice([tool for tool in TOOLS if tool.noun not in self.holder])

    def mend(self, helper: Person, other: Person, tool: Tool) -> None:
        """Write that ``helper`` ends the trouble of ``other`` with the tool, and is thanked."""
        self.say(self.rng.choice(["quickly ", "", ""]) + tool.fix.format(a=helper.name, b=other.name))
        self.facts[f"Who helped {other.name}?"] = f"{helper.name} helped {other.name} with the {tool.noun}."
        thanks = self.rng.choice(
            ["Thank you", "Thank you so much", "What a good idea", "You are a true friend"]
        )
        self.say(f'"{thanks}, {helper.name}!" said {other.name}')


# Plots: each writes one chapter. `find_a_tool` writes a part of one.


def find_a_tool(teller: Teller, person: Person) -> Tool:
    """Write that a person goes to a place and finds a tool that nobody holds. Returns the tool."""
    tool, place = teller.new_tool(), teller.elsewhere(person)
    teller.go(person, place)
    how = teller.rng.choice(
        ["There {0} found {1}", "{0} looked around and found {1}", "Under a stone {0} saw {1}"]
    )
    teller.say(how.format(person.subject, with_article(tool.noun)))
    wish = teller.rng.choice([f"With this I can {tool.use}", f"Now I can {tool.use}"])
    teller.say(f'"{wish}," said {person.name}, and {person.subject} took the {tool.noun} along')
    teller.facts[f"Where did {person.name} find the {tool.noun}?"] = (
        f"{person.name} found the {tool.noun} {place.where}."
    )
    teller.take(person, tool)
    return tool


def help_a_friend(teller: Teller) -> None:
    """Write a chapter: the friend is in trouble, and the hero helps with the right tool."""
    hero, friend = teller.cast.hero, teller.cast.friend
    held = teller.held_by(hero)
    tool = teller.rng.choice(held) if held else find_a_tool(teller, hero)
    teller.go(
        hero, teller.elsewhere(hero, friend), teller.rng.choice(["Then ", "Later that day ", "After that, "])
    )
    teller.meet(hero, friend)
    teller.say(teller.rng.choice(["", "suddenly ", "but "]) + tool.trouble.format(b=friend.name))
    if teller.rng.random() < 0.5:
        teller.say(f'"Do not worry, {friend.name}," said {hero.name}. "I have {with_article(tool.noun)}"')
    teller.mend(hero, friend, tool)


def borrow(teller: Teller) -> None:
    """Write a chapter: a third person is in trouble, and the hero borrows the tool from the friend."""
    hero, friend, third = teller.cast.hero, teller.cast.friend, teller.cast.third
    held = teller.held_by(friend)
    tool = teller.rng.choice(held) if held else teller.new_tool()
    trouble_at = teller.elsewhere(hero, friend)
    teller.go(hero, trouble_at)
    teller.meet(hero, third)
    teller.say(teller.rng.choice(["", "that day "]) + tool.trouble.format(b=third.name))
    friend_at = teller.elsewhere(hero)
    teller.say(f"{hero.name} did not have {with_article(tool.noun)}, but {teller.mention(friend)} had one")
    teller.go(hero, friend_at, "So ")
    teller.place[friend.name] = friend_at
    teller.say(f'"{friend.name}, may I borrow your {tool.noun}?" asked {hero.name}')
    teller.say(f'"Of course," said {friend.name}, and gave {hero.object} the {tool.noun}')
    teller.go(hero, trouble_at, "Then ")
    teller.mend(hero, third, tool)
    if teller.rng.random() < 0.5:
        teller.take(friend, tool)
        teller.say(f"in the evening {hero.name} brought the {tool.noun} back to {friend.name}")
    else:
        teller.take(hero, tool)
        teller.say(f'"Keep the {tool.noun}, {hero.name}," said {friend.name} in the evening')


def lose_and_find(teller: Teller) -> None:
    """Write a chapter: the hero loses something, and the friend knows where it lies."""
    hero, friend = teller.cast.hero, teller.cast.friend
    held = teller.held_by(hero)
    tool = teller.rng.choice(held) if held else teller.new_tool()
    wrong, right = teller.rng.sample(PLACES, 2)
    owned = "the" if held else hero.possessive
    teller.say(f"one {teller.rng.choice(['morning', 'evening', 'day'])} {hero.name} lost {owned} {tool.noun}")
    teller.say(f"{hero.subject} looked for it {wrong.where}, but it was not there")
    teller.say(
        f"{hero.name} was {teller.rng.choice(['sad', 'worried', 'upset'])} and asked {teller.mention(friend)}"
    )
    teller.say(f'"I saw {with_article(tool.noun)} {right.where}," said {friend.name}')
    teller.go(hero, right, teller.rng.choice(["So ", "At once ", ""]))
    teller.say(f"there was the {tool.noun}, and {hero.name} was happy again")
    teller.facts[f"What did {hero.name} lose?"] = f"{hero.name} lost {with_article(tool.noun)}."
    teller.facts[f"Where did {hero.name} find the {tool.noun}?"] = (
        f"{hero.name} found the {tool.noun} {right.where}."
    )
    teller.take(hero, tool)


def swap(teller: Teller) -> None:
    """Write a chapter: hero and friend trade what they hold."""
    hero, friend = teller.cast.hero, teller.cast.friend
    held = teller.held_by(hero)
    mine = teller.rng.choice(held) if held else find_a_tool(teller, hero)
    theirs = teller.rng.choice(
        teller.held_by(friend)
        or [tool for tool in TOOLS if tool.noun not in teller.holder and tool is not mine]
    )
    teller.go(hero, teller.elsewhere(hero, friend), teller.rng.choice(["Then ", "In the afternoon "]))
    teller.meet(hero, friend)
    teller.say(f"{friend.name} had {with_article(theirs.noun)}")
    teller.say(f'"I would like to {mine.use}," said {friend.name}. "Shall we swap?"')
    teller.say(f"so {hero.name} gave {friend.name} the {mine.noun} and got the {theirs.noun}")
    teller.take(friend, mine)
    teller.take(hero, theirs)


def birthday(teller: Teller) -> None:
    """Write a chapter: the hero buys a present, and it is just what the friend wished for."""
    hero, friend = teller.cast.hero, teller.cast.friend
    tool = teller.new_tool()
    teller.say(f"it was the birthday of {teller.mention(friend)}, and {hero.name} had no present yet")
    teller.say(f'"I wish I could {tool.use}," {friend.name} had said the day before')
    teller.go(hero, next(place for place in PLACES if place.noun == "market"), "So ")
    teller.say(
        f"there {hero.subject} bought {with_article(tool.noun)} for {teller.rng.choice(NUMBERS[1:])} coins"
    )
    if teller.rng.random() < 0.5:
        teller.say(f"{hero.name} put a red ribbon around it")
    teller.say(f'"Happy birthday, {friend.name}!" said {hero.name}')
    teller.say(f"{friend.name} opened the present and saw the {tool.noun}")
    if teller.rng.random() < 0.5:
        teller.say(f'"{with_article(tool.noun).capitalize()}! Now I can {tool.use}," said {friend.name}')
    teller.facts[f"What did {hero.name} give {friend.name}?"] = (
        f"{hero.name} gave {friend.name} {with_article(tool.noun)}."
    )
    teller.take(friend, tool)


def race(teller: Teller) -> None:
    """Write a chapter: hero and friend run a race; one of them stops or falls on the way, and the other wins."""
    hero, friend = teller.cast.hero, teller.cast.friend
    goal = teller.elsewhere(hero)
    teller.say(f"{hero.name} and {teller.mention(friend)} ran a race to the {goal.noun}")
    winner, loser = teller.rng.sample([hero, friend], 2)
    reason, feeling = teller.rng.choice(
        [
            (f"stopped to eat some {loser.kind.food}", "hungry"),
            ("lay down under a tree to sleep", "tired"),
            ("fell over a stone", "too fast"),
        ]
    )
    teller.say(f"{loser.name} was {feeling} and {reason}, so {winner.name} won the race")
    teller.say(f'"You won, {winner.name}!" said {loser.name}, and they both laughed')
    teller.place[hero.name] = teller.place[friend.name] = goal
    teller.facts["Who won the race?"] = f"{winner.name} won the race."
    teller.facts[f"Why did {loser.name} not win?"] = f"{loser.name} {reason}."


def bake(teller: Teller) -> None:
    """Write a chapter: the hero collects what is needed, bakes, and shares."""
    hero, friend = teller.cast.hero, teller.cast.friend
    dish = teller.rng.choice(DISHES)
    teller.say(f"{hero.name} wanted to make {with_article(dish)} for {teller.mention(friend)}")
    things = teller.rng.sample(sorted(INGREDIENTS), teller.rng.choice([2, 3]))
    listed = ", ".join(things[:-1]) + f" and {things[-1]}"
    teller.say(f"for the {dish} {hero.subject} needed {listed}")
    for opening, thing in zip(("First ", "Then ", "At last "), things, strict=False):
        place = next(place for place in PLACES if place.noun == INGREDIENTS[thing])
        teller.go(hero, place, opening)
        teller.say(f"{place.where} {hero.subject} got the {thing}")
    teller.say(f"soon the {dish} was ready, and it smelled wonderful")
    teller.say(f"{hero.name} and {friend.name} ate it together")
    teller.facts[f"What did {hero.name} make?"] = f"{hero.name} made {with_article(dish)} for {friend.name}."


def hide_and_seek(teller: Teller) -> None:
    """Write a chapter: the friend hides, and the hero looks in one or two wrong places first."""
    hero, friend = teller.cast.hero, teller.cast.friend
    places = teller.rng.sample(PLACES, teller.rng.choice([2, 3]))
    teller.say(f"{hero.name} and {teller.mention(friend)} played hide and seek")
    last = teller.rng.randint(3, 10)
    teller.say(f"{hero.name} closed {hero.possessive} eyes and counted: {', '.join(NUMBERS[:last])}")
    for place in places[:-1]:
        teller.say(f"{hero.subject} looked {place.where}, but nobody was there")
    teller.say(f"then {hero.name} looked {places[-1].where}, and there was {friend.name}")
    teller.say(f'"Here you are!" said {hero.name}, and they both laughed')
    teller.place[hero.name] = teller.place[friend.name] = places[-1]
    teller.facts[f"Where did {friend.name} hide?"] = f"{friend.name} hid {places[-1].where}."


PLOTS: tuple[Callable[[Teller], None], ...] = (
    help_a_friend,
    borrow,
    lose_and_find,
    swap,
    birthday,
    race,
    bake,
    hide_and_seek,
)


def begin(teller: Teller) -> None:
    """Introduce the hero, in one of a few ways."""
    hero, rng = teller.cast.hero, teller.rng
    noun = hero.kind.noun
    teller.introduced.add(hero.name)
    teller.facts[f"What is {hero.name}?"] = f"{hero.name} is {with_article(noun)}."
    opening = rng.choice(["Once upon a time", "Once upon a time", "Long ago", "Once"])
    teller.say(f"{opening} there was {with_article(hero.trait)} {noun} named {hero.name}")
    if rng.random() < 0.5:
        teller.say(f"{hero.subject} lived in {hero.kind.home}")
        teller.facts[f"Where does {hero.name} live?"] = f"{hero.name} lives in {hero.kind.home}."
    if rng.random() < 0.3:
        teller.say(f"{hero.name} loved to eat {hero.kind.food}")
        teller.facts[f"What does {hero.name} like to eat?"] = f"{hero.name} likes to eat {hero.kind.food}."
    if rng.random() < 0.4:
        teller.say(rng.choice(WEATHER))


def end(teller: Teller) -> None:
    """Close the story, now and then with a moral, an emoji, or ``The end.``"""
    hero, rng = teller.cast.hero, teller.rng
    people = [
        person for person in (teller.cast.friend, teller.cast.third) if person.name in teller.introduced
    ]
    other = rng.choice(people)
    closing = [
        f"from that day on, {hero.name} and {other.name} were the best of friends",
        f"{hero.name} and {other.name} ate {hero.kind.food} together until the moon was high",
        f'"What a {rng.choice(["wonderful", "strange", "good"])} day!" said {hero.name}',
        f"at night {hero.name} went home and slept well",
    ]
    teller.say(rng.choice(closing))
    if "went home" in teller.sentences[-1]:
        teller.facts[f"Where did {hero.name} go last?"] = f"{hero.name} went home."
    if rng.random() < 0.4:
        teller.say(rng.choice(MORALS))
    if rng.random() < 0.3:
        teller.sentences[-1] += " " + rng.choice(
            [hero.kind.emoji, hero.kind.emoji, teller.cast.tool.emoji, "❤️"]
        )
    if rng.random() < 0.2:
        teller.say("The end")


def tell(rng: random.Random, cast: Cast, chapters: int) -> Story:
    """Return a story of one to three chapters. Each chapter is a paragraph."""
    teller = Teller(rng, cast)
    begin(teller)
    paragraphs = []
    later = rng.sample(LATER, chapters)
    for number, plot in enumerate(rng.sample(PLOTS, chapters)):
        if number:
            paragraphs.append(" ".join(teller.sentences))
            teller.sentences = [later[number]]
        plot(teller)
    end(teller)
    paragraphs.append(" ".join(teller.sentences))
    questions = list(teller.facts.items())
    rng.shuffle(questions)
    return Story("\n\n".join(paragraphs), cast, tuple(questions))


# --------------------------------------------------------------------------------------------------
# Documents: plain text for completion, and conversations for the chat template.

Message = dict[str, str]  # role and content, as chat templates take them


def draw_story(rng: random.Random) -> Story:
    """Return a story, mostly of one chapter."""
    return tell(rng, Cast.draw(rng), rng.choices([1, 2, 3], [6, 3, 1])[0])


def request_for(rng: random.Random, cast: Cast) -> str:
    """Return a user's request for a story with this cast."""
    hero, friend = cast.hero, cast.friend
    noun = with_article(hero.kind.noun)
    about = rng.choice(
        [
            f"{noun}",
            f"{noun}",
            f"{noun} named {hero.name}",
            f"{noun} named {hero.name}",
            f"{hero.name} the {hero.kind.noun}",
            f"{with_article(hero.trait)} {hero.kind.noun}",
            f"{hero.name} and {friend.name}",
            f"{noun} and {with_article(cast.tool.noun)}",
            f"{noun} named {hero.name} who finds {with_article(cast.tool.noun)}",
        ]
    )
    ask = ["Tell me a story about {}.", "Tell me a story about {}.", "Write a short story about {}.",
           "Can you tell me a story about {}?", "Please tell me about {}."]  # fmt: skip
    return rng.choice(ask).format(about)


def fact_of_the_world(rng: random.Random) -> tuple[str, str]:
    """Return a question that needs no story, and its answer."""
    tool, kind, place, thing = (
        rng.choice(TOOLS),
        rng.choice(KINDS),
        rng.choice(PLACES),
        rng.choice(sorted(INGREDIENTS)),
    )
    start, last = sorted(rng.sample(range(10), 2))
    counted = ", ".join(NUMBERS[start : last + 1])
    three = [with_article(some.noun) for some in rng.sample(KINDS, 3)]
    return rng.choice(
        [
            (f"What is {with_article(tool.noun)} for?",
             f"With {with_article(tool.noun)} you can {tool.use}. {tool.emoji}"),
            (f"What do I need to {tool.use}?", f"You need {with_article(tool.noun)} to {tool.use}."),
            (f"Where does {with_article(kind.noun)} live?",
             f"{sentence(with_article(kind.noun))[:-1]} lives in {kind.home}."),
            (f"What does {with_article(kind.noun)} like to eat?",
             f"{sentence(with_article(kind.noun))[:-1]} likes to eat {kind.food}. {kind.emoji}"),
            (f"Where can I get {thing}?", f"You can get {thing} at the {INGREDIENTS[thing]}."),
            (f"Count from {NUMBERS[start]} to {NUMBERS[last]}.", sentence(counted)),
            ("Name three friends.", f"{sentence(three[0])[:-1]}, {three[1]} and {three[2]}."),
            (f"Who can I meet {place.where}?", f"You can meet {three[0]} and {three[1]} {place.where}."),
            (f"What comes after {NUMBERS[start]}?", f"After {NUMBERS[start]} comes {NUMBERS[start + 1]}."),
        ]
    )  # fmt: skip


def plain_document(rng: random.Random) -> str:
    """Return a text to complete: a story, a request and a story, a story and questions, or questions alone."""
    story = draw_story(rng)
    form = rng.random()
    if form < 0.55:
        return story.text
    if form < 0.65:
        return f"{request_for(rng, story.cast)}\n\n{story.text}"
    if form < 0.75:
        pairs: Sequence[tuple[str, str]] = [fact_of_the_world(rng) for _ in range(rng.randint(1, 4))]
        return "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)
    pairs = story.questions[: rng.randint(1, 4)]
    return "\n\n".join(
        [story.text, *(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)]
    )


def conversation(rng: random.Random) -> list[Message]:
    """Return a conversation of user and assistant. One in six has a system message in front."""
    story = draw_story(rng)
    turns: list[tuple[str, str]] = []
    form = rng.random()
    if form < 0.1:
        hello = rng.choice(["Hello!", "Hi!", "Good morning!", "Hello there!"])
        turns.append((hello, "Hello! 👋 Would you like to hear a story?"))
    if form < 0.5:
        turns.append((request_for(rng, story.cast), story.text))
        turns.extend(story.questions[: rng.choice([0, 0, 1, 2])])
    elif form < 0.75:
        first, *more = story.questions[: rng.randint(1, 3)]
        turns.append((f"{story.text}\n\n{first[0]}", first[1]))
        turns.extend(more)
    else:
        turns.extend(fact_of_the_world(rng) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.1:
        turns.append((rng.choice(["Thank you!", "Thanks!"]), "You are welcome! ❤️"))
    messages = [{"role": "system", "content": "You tell stories and answer questions."}] * (
        rng.random() < 1 / 6
    )
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
