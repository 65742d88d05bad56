"""What the built-in prompts ask for, before a constraint is added: requests, their words, lists to copy.

A request is a form about a subject, or a question that yes, no or maybe answers. Its `words` are what constraints
on keywords draw from, so that these fit what is asked.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hymoe.engine.data.schema import Message
from hymoe.engine.eval.words import words_of


@dataclass(frozen=True, slots=True)
class Task:
    """A request that constraints are added to."""

    text: str  # the last user turn
    words: tuple[str, ...]  # keywords that fit, in lower case
    is_yes_no: bool = False
    before: tuple[Message, ...] = ()  # earlier turns, a system message among them
    origin: str = "template"  # or "seed": a prompt of the user's
    origin_id: str | None = None  # the id of the user's prompt


FORMS = (
    "Write a short story about {}.",
    "Write a blog post about {}.",
    "Write a poem about {}.",
    "Write the first page of a novel that is set around {}.",
    "Write an email to a friend about {}.",
    "Write a formal letter to a town council about {}.",
    "Write a speech for a school assembly about {}.",
    "Write a product description for something that has to do with {}.",
    "Write a dialogue between two neighbours about {}.",
    "Write a short news report about {}.",
    "Write a review of a book about {}.",
    "Write an advertisement that has to do with {}.",
    "Explain {} to a child of ten.",
    "Explain {} to somebody who has never heard of it.",
    "Give practical advice about {}.",
    "Describe a childhood memory that has to do with {}.",
    "Summarise what most people should know about {}.",
    "Compare two views on {}.",
    "List the main arguments in a debate about {}.",
    "Plan a lesson of one hour about {}.",
    "Suggest a weekend project that has to do with {}.",
    "Write a set of questions and answers about {}.",
    "Write instructions for a beginner about {}.",
    "Write a diary entry of somebody who has just learned about {}.",
)
# Subject: its words.
SUBJECTS = {
    "a river that floods every spring": "river water bridge village boats meadow",
    "an old lighthouse": "lamp keeper rocks storm stairs harbour",
    "baking bread at home": "flour yeast oven dough crust kitchen",
    "learning to ride a bicycle": "wheel balance helmet brake pedal hill",
    "a night train": "station ticket window conductor luggage tunnel",
    "growing tomatoes on a balcony": "soil seeds sunlight harvest bucket leaves",
    "a library at closing time": "shelves books silence lamp reader stairs",
    "how bees make honey": "hive flowers nectar wings queen colony",
    "the history of paper": "fibres scribe printing letters forest invention",
    "moving to a new city": "boxes neighbours street market friends apartment",
    "a chess tournament": "board pawn clock opponent strategy victory",
    "saving energy in a household": "heating windows bulbs insulation meter savings",
    "a lost dog that comes home": "garden collar street family barking evening",
    "planning a mountain hike": "trail boots weather summit compass backpack",
    "how the tides work": "moon ocean gravity shore coast cycle",
    "a job interview": "questions experience salary manager confidence resume",
    "repairing an old radio": "wires solder speaker battery dial workshop",
    "the first day of winter": "frost snow jacket chimney silence breath",
    "teaching children to swim": "pool breathing lifeguard floating patience lesson",
    "a market in a small town": "fruit baskets prices farmers cheese square",
    "how vaccines work": "immune cells virus protection doctor research",
    "writing clear documentation": "examples readers headings software structure feedback",
    "a piano in an empty house": "keys dust melody floor curtains memory",
    "travelling with a small budget": "hostel bus savings backpack meals planning",
    "keeping a garden in a dry summer": "water shade mulch roots evening compost",
    "the invention of the telescope": "lens planets glass observer discovery stars",
    "a family recipe": "grandmother spices kitchen dinner secret tradition",
    "working from home": "desk schedule meetings breaks family focus",
    "how a dam produces electricity": "turbine reservoir pressure generator valley power",
    "an island without cars": "ferry horses beach paths quiet visitors",
    "public transport in a growing city": "buses tickets commuters routes traffic planning",
    "a violin maker": "wood strings varnish workshop sound patience",
    "why leaves change colour in autumn": "pigment sunlight branches season forest green",
    "preparing for an exam": "notes sleep practice schedule questions teacher",
    "a rescue at sea": "waves helicopter rope captain radio courage",
    "sorting and reusing waste": "plastic glass bottles compost factory habits",
    "a castle that became a school": "towers students courtyard lessons walls history",
    "how search engines find pages": "index links ranking keywords crawler results",
    "adopting a cat": "shelter food veterinarian patience blanket playing",
    "a long drought": "harvest wells farmers clouds prices government",
    "restoring a wooden boat": "planks paint harbour tools sails summer",
    "the value of good sleep": "dreams rest memory health bedroom habits",
    "a music festival in the rain": "stage mud guitar tents crowd umbrella",
    "how a parliament makes laws": "vote debate committee citizens minister speech",
    "an unexpected letter": "envelope stamp handwriting secret uncle journey",
    "running a small bakery": "customers oven prices morning flour counter",
    "the search for a lost painting": "museum canvas detective clue frame collector",
    "first aid in everyday life": "bandage wound ambulance breathing calm training",
}
QUESTIONS = {
    "Is a tomato a fruit?": "seeds plant kitchen",
    "Can people live on the moon some day?": "oxygen water station",
    "Is it a good idea to learn two languages at the same time?": "practice grammar memory",
    "Should every town have a public library?": "books children budget",
    "Do cats understand their own names?": "sound habit research",
    "Is working at night bad for your health?": "sleep light rhythm",
    "Can a computer write a good poem?": "rhythm words feeling",
    "Should homework be given at weekends?": "students rest practice",
    "Is it safe to swim right after a meal?": "stomach cramps water",
    "Will paper books disappear?": "readers screens shelves",
    "Is tea healthier than coffee?": "caffeine leaves morning",
    "Can plants grow without soil?": "roots water minerals",
    "Should cars be banned from city centres?": "traffic noise shops",
    "Is it possible to remember every dream?": "sleep notes morning",
    "Do we need to drink eight glasses of water a day?": "thirst food kidneys",
    "Is a whale a fish?": "lungs ocean mammals",
    "Should a beginner buy an expensive guitar?": "strings sound budget",
    "Can you see the stars from a big city?": "lights clouds telescope",
    "Is chess a sport?": "board training competition",
    "Would a four-day working week be better for most people?": "hours salary rest",
}
ITEMS = (  # for lists that are to be copied
    *(
        "apple",
        "bridge",
        "candle",
        "castle",
        "cloud",
        "desert",
        "dragon",
        "eagle",
        "feather",
        "forest",
    ),
    *(
        "garden",
        "hammer",
        "honey",
        "island",
        "kettle",
        "ladder",
        "lamp",
        "mirror",
        "moon",
        "needle",
    ),
    *(
        "ocean",
        "paper",
        "pepper",
        "pocket",
        "river",
        "rocket",
        "silver",
        "stone",
        "thunder",
        "tiger",
    ),
    *(
        "tower",
        "violin",
        "anchor",
        "basket",
        "button",
        "camera",
        "carpet",
        "cherry",
        "copper",
        "cotton",
    ),
    *(
        "diamond",
        "engine",
        "fountain",
        "glacier",
        "guitar",
        "helmet",
        "jacket",
        "lemon",
        "marble",
        "meadow",
    ),
    *(
        "orange",
        "parrot",
        "pencil",
        "planet",
        "rabbit",
        "saddle",
        "spider",
        "sugar",
        "ticket",
        "tunnel",
    ),
    *("valley", "velvet", "window", "winter"),
)
COMMON = (  # words that any text may have: to ask for, or to forbid
    *(
        "always",
        "because",
        "better",
        "change",
        "different",
        "early",
        "enough",
        "everyone",
        "example",
        "finally",
    ),
    *(
        "however",
        "important",
        "later",
        "little",
        "often",
        "people",
        "perhaps",
        "place",
        "quite",
        "reason",
    ),
    *(
        "really",
        "simple",
        "sometimes",
        "together",
        "usually",
        "various",
        "very",
        "while",
        "world",
        "years",
    ),
)
STOP_WORDS = frozenset(
    [
        "about",
        "above",
        "after",
        "again",
        "also",
        "been",
        "before",
        "being",
        "below",
        "between",
        "both",
        "cannot",
        "could",
        "does",
        "doing",
        "down",
        "each",
        "from",
        "further",
        "have",
        "having",
        "here",
        "into",
        "itself",
        "just",
        "make",
        "more",
        "most",
        "much",
        "must",
        "only",
        "other",
        "over",
        "please",
        "same",
        "should",
        "some",
        "such",
        "than",
        "that",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "through",
        "under",
        "until",
        "very",
        "want",
        "what",
        "when",
        "where",
        "which",
        "while",
        "will",
        "with",
        "would",
        "write",
        "your",
        "yours",
    ]
)
YES_NO_STARTS = frozenset(
    [
        "is",
        "are",
        "was",
        "were",
        "do",
        "does",
        "did",
        "can",
        "could",
        "will",
        "would",
        "should",
        "has",
        "have",
        "had",
        "may",
        "might",
        "must",
        "shall",
    ]
)


def built_in() -> list[Task]:
    """Every request: each form about each subject, and the questions."""
    tasks = [
        Task(form.format(subject), tuple(words.split()))
        for form, (subject, words) in itertools.product(FORMS, SUBJECTS.items())
    ]
    return tasks + [Task(text, tuple(words.split()), True) for text, words in QUESTIONS.items()]


def of_user(messages: Sequence[Message], id: str | int) -> Task:
    """A user's own prompt as a task; its words are those of the prompt that mean something.

    Args:
        messages: ends with a user turn that has text.
        id: of the prompt.
    """
    text = messages[-1].content or ""
    words = [word.lower() for word in words_of(text) if word.isalpha() and len(word) > 3]
    words = [word for word in dict.fromkeys(words) if word not in STOP_WORDS]
    first = next(iter(words_of(text)), "").lower()
    is_yes_no = text.rstrip().endswith("?") and first in YES_NO_STARTS and text.count("?") == 1
    return Task(text, tuple(words), is_yes_no, tuple(messages[:-1]), "seed", str(id))
