"""Templates, topics and small functions from which `make_prompts.py` composes prompts."""

from __future__ import annotations

from itertools import pairwise

TASKS = (
    "Write a short essay about {topic}.",
    "Explain {topic} to a ten year old child.",
    "Explain how {topic} and {other} are related.",
    "What is {topic}?",
    "What are the main causes and effects of {topic}?",
    "List {n} facts about {topic}.",
    "List {n} common mistakes people make about {topic} and how to avoid them.",
    "Compare {topic} with {other}. Use a table.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a blog post introduction about {topic} for readers interested in {other}.",
    "Write a poem about {topic}.",
    "Write a haiku about {thing}s and another one about {topic}.",
    "Tell me a story about a {job} in {place} who discovers {topic}.",
    "Write the first paragraph of a novel about a {job} named {name} who lives in {place}.",
    "Write a dialogue between a {job} and a customer about {topic}.",
    "Imagine you are a {job}. Give advice to somebody who wants to learn about {topic}.",
    "Pretend to be a {job} from {place} and tell me about your typical day.",
    "You are an experienced {job}. A beginner asks: how should I start with {topic}?",
    "Write a polite email to {name} asking for help with {topic}.",
    "Write a letter of recommendation for {name}, who worked as a {job} in {place}.",
    "Write an email to a {job} in {place} to cancel a meeting about {topic}.",
    "Draft a speech on {topic} in {n} short paragraphs.",
    "Give me step by step instructions for a school project about {topic}.",
    "Make a {n} day plan for a trip to {place}.",
    "What should I see in {place}? I am interested in {topic}.",
    "Describe {place} as seen by a {job}.",
    "Summarize the history of {topic} in {n} sentences.",
    "Who are the most important people in the history of {topic}?",
    "How does {topic} work?",
    "Why is {topic} important for a {job}?",
    "What would happen if {topic} did not exist?",
    "Give {n} arguments for and {n} arguments against {topic}.",
    "Suggest {n} books about {topic} and describe each in one sentence.",
    "Create a quiz with {n} questions about {topic}. Give the answers at the end.",
    "Write a product description for a {thing} made for every {job}.",
    "Write an advertisement for a {thing} shop in {place}.",
    "Write a review of a {thing} that {name} bought in {place}.",
    "Give me {n} ideas for a birthday present for {name}, a {job} who likes {topic}.",
    'Correct the grammar of this text: "{name} dont know nothing on {topic}, he are a {job}."',
    'Rewrite in a formal style: "Hey {name}, the {thing} you sold me is broken, fix it!"',
    'Translate into simple English: "The {job} contemplated the ramifications of {topic}."',
    'Extract all names and places from this text: "{name} went to {place} with a {thing}. There '
    'a {job} told {name} everything about {topic}." Answer in JSON.',
    "Put these words in alphabetical order: {topic}, {thing}, {job}, {place}, {name}, {other}.",
    "Classify each word as a person, place or thing: {name}, {place}, {thing}.",
    'Read the text and answer the question. Text: "{name} is a {job}. {name} lives in {place} and '
    'has {n} {thing}s." Question: where does {name} live, and what does {name} own?',
    "{name} is taller than the {job}. The {job} is taller than the child. Is {name} taller than "
    "the child? Explain your reasoning.",
    "There are {n} {thing}s in a box. I take one out and put two in. How many are there now?",
    "Which of these does not belong: {thing}, {topic}, {place}? Why?",
    "What is the difference between {topic} and {other}?",
    "How has {topic} changed the way people live in {place}?",
    "What role does {topic} play in modern society?",
    "Describe an experiment that shows how {topic} works.",
    "What are the ethical questions around {topic}?",
    "Design a simple system that helps a {job} with {topic}. Describe its main parts.",
    "Write a Python class `{thing}` with a constructor, two methods and a docstring.",
    "Write a Python program that stores {n} {thing}s in a dictionary and prints them sorted.",
    "Write HTML for a page about {topic} with a list of {n} items.",
    "Write a SQL query that finds every {job} in {place}.",
    "Write a JavaScript function that counts how often the word {thing} occurs in a text.",
    "Explain what a {thing} has in common with {topic}. Be funny.",
    "Give me a recipe with {n} ingredients that a {job} could cook in {place}.",
    "I feel sad because of {topic}. What can I do?",
    "How can I become a {job}?",
    "Convince {name} that {topic} matters more than {other}.",
)

TOPICS = tuple(
    """climate change|photosynthesis|the water cycle|gravity|black holes|the solar system|volcanoes
earthquakes|the human heart|sleep|vaccines|antibiotics|genetics|evolution|cells|bacteria|vitamins
healthy food|running|yoga|meditation|stress|memory|learning languages|reading|public libraries
homework|online courses|the printing press|the Roman Empire|ancient Egypt|the Renaissance
the Industrial Revolution|the French Revolution|world trade|inflation|taxes|banks|saving money
the stock market|insurance|renting a flat|small businesses|advertising|leadership|teamwork
time management|remote work|job interviews|negotiation|friendship|family traditions|weddings
parenting|adoption of pets|dogs|cats|bees|whales|penguins|elephants|birds of prey|coral reefs
rain forests|deserts|rivers|mountains|gardening|organic farming|recycling|plastic waste
solar energy|wind power|nuclear power|electric cars|bicycles|trains|aeroplanes|space travel|robots
artificial intelligence|machine learning|neural networks|computer games|programming|Python
data structures|sorting algorithms|databases|the internet|encryption|passwords|social media
smartphones|photography|painting|sculpture|architecture|classical music|jazz|guitars|dancing
theatre|film making|poetry|fairy tales|detective novels|newspapers|freedom of speech|democracy
elections|human rights|the law|the police|prisons|philosophy|ethics|happiness|dreams|fear|anger
justice|religion and science|mathematics|prime numbers|fractions|probability|statistics|geometry
calculus|chemistry|acids and bases|the periodic table|electricity|magnets|light|sound|heat
thermodynamics|quantum mechanics|relativity|atoms|steel|paper|glass|chocolate|coffee|tea|bread
cheese|wine|spices|rice|fishing|football|basketball|tennis|swimming|chess|the Olympic Games
winter|autumn leaves|holidays|tourism|museums|zoos|maps|the calendar|clocks|fashion|furniture
cleaning|cooking|camping|first aid|allergies|headaches|teeth|eyes|old age|childhood""".replace(
        "\n", "|"
    ).split("|")
)

JOBS = tuple(
    """teacher|doctor|nurse|farmer|baker|carpenter|pilot|sailor|engineer|programmer|lawyer|judge
journalist|photographer|painter|musician|actor|waiter|cook|gardener|librarian|scientist|astronaut
plumber|electrician|mechanic|taxi driver|policeman|firefighter|shopkeeper|tailor|translator|guide
detective|king|wizard|student|football coach|historian|biologist""".replace("\n", "|").split("|")
)

PLACES = tuple(
    """Paris|London|Rome|Berlin|Madrid|Lisbon|Vienna|Prague|Athens|Istanbul|Cairo|Nairobi|Lagos
Cape Town|Mumbai|Delhi|Bangkok|Hanoi|Beijing|Tokyo|Seoul|Sydney|Auckland|Toronto|Chicago|Boston
Mexico City|Lima|Buenos Aires|Rio de Janeiro|Iceland|Norway|Scotland|Texas|California|a lonely island
a small village|the desert|the mountains|a spaceship""".replace("\n", "|").split("|")
)

NAMES = tuple(
    """Anna|Ben|Clara|Daniel|Emma|Felix|Grace|Henry|Ivy|Jack|Kate|Leo|Maria|Noah|Olivia|Paul|Rosa
Sam|Tina|Victor|Wendy|Yusuf|Zoe|Priya|Chen|Fatima|Diego|Amara""".replace("\n", "|").split("|")
)

THINGS = tuple(
    """apple|book|pencil|chair|table|lamp|bottle|bicycle|guitar|hat|jacket|shoe|clock|phone|camera
ticket|flower|tree|cookie|sandwich|orange|ball|kite|marble|stamp|coin|box|basket|candle|mirror
cup|plate|key|map|ring|drum|boat|car|train|robot""".replace("\n", "|").split("|")
)

# ruff: noqa: E501 - a table
# name, kind of the argument, the order in words, the function itself
OPERATIONS = (
    ("sum_all", "list", "return the sum of all numbers", sum),
    ("largest", "list", "return the largest number", max),
    ("smallest", "list", "return the smallest number", min),
    ("count_items", "list", "return how many numbers there are", len),
    ("sort_up", "list", "sort the numbers in ascending order", sorted),
    ("sort_down", "list", "sort the numbers in descending order", lambda v: sorted(v)[::-1]),
    ("reverse", "list", "reverse the order of the numbers", lambda v: v[::-1]),
    ("only_even", "list", "keep only the even numbers", lambda v: [x for x in v if x % 2 == 0]),
    ("only_odd", "list", "keep only the odd numbers", lambda v: [x for x in v if x % 2]),
    ("only_positive", "list", "keep only the positive numbers", lambda v: [x for x in v if x > 0]),
    ("squares", "list", "square every number", lambda v: [x * x for x in v]),
    ("double", "list", "double every number", lambda v: [2 * x for x in v]),
    ("absolute", "list", "replace every number by its absolute value", lambda v: [abs(x) for x in v]),
    ("unique", "list", "remove duplicates and keep the order", lambda v: list(dict.fromkeys(v))),
    ("without_first", "list", "remove the first number", lambda v: v[1:]),
    ("without_last", "list", "remove the last number", lambda v: v[:-1]),
    ("every_second", "list", "keep every second number", lambda v: v[::2]),
    ("running_sum", "list", "return the running sums", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
    ("differences", "list", "return the differences of neighbours", lambda v: [b - a for a, b in pairwise(v)]),
    ("spread", "list", "return the difference of the largest and the smallest number", lambda v: max(v) - min(v)),
    ("mean", "list", "return the mean rounded to two places", lambda v: round(sum(v) / len(v), 2)),
    ("is_sorted", "list", "tell whether the numbers are in ascending order", lambda v: v == sorted(v)),
    ("index_of_largest", "list", "return the index of the largest number", lambda v: v.index(max(v))),
    ("pairs", "list", "return all neighbouring pairs", lambda v: list(pairwise(v))),
    ("to_upper", "str", "convert it to upper case", str.upper),
    ("capitalize_words", "str", "capitalize every word", str.title),
    ("reverse_text", "str", "reverse the characters", lambda v: v[::-1]),
    ("reverse_words", "str", "reverse the order of the words", lambda v: " ".join(v.split()[::-1])),
    ("count_vowels", "str", "return the number of vowels", lambda v: sum(c in "aeiou" for c in v)),
    ("remove_vowels", "str", "remove all vowels", lambda v: "".join(c for c in v if c not in "aeiou")),
    ("count_words", "str", "return the number of words", lambda v: len(v.split())),
    ("longest_word", "str", "return the longest word", lambda v: max(v.split(), key=len)),
    ("first_letters", "str", "return the first letter of every word", lambda v: "".join(w[0] for w in v.split())),
    ("is_palindrome", "str", "tell whether it reads the same backwards", lambda v: v == v[::-1]),
    ("letter_counts", "str", "count every letter in a dictionary", lambda v: {c: v.count(c) for c in v}),
    ("sorted_letters", "str", "sort its letters", lambda v: "".join(sorted(v))),
    ("without_spaces", "str", "remove all spaces", lambda v: v.replace(" ", "")),
    ("factorial", "int", "return its factorial", lambda v: 1 if v < 2 else v * OPERATIONS[37][3](v - 1)),
    ("divisors", "int", "return all its divisors", lambda v: [d for d in range(1, v + 1) if v % d == 0]),
    ("is_prime", "int", "tell whether it is prime", lambda v: v > 1 and all(v % d for d in range(2, v))),
    ("digit_sum", "int", "return the sum of its digits", lambda v: sum(map(int, str(v)))),
    ("binary", "int", "return it in binary notation", lambda v: bin(v)[2:]),
    ("fibonacci", "int", "return that many Fibonacci numbers", lambda v: _fibonacci(v % 10)),
    ("collatz", "int", "return the number of Collatz steps to 1", lambda v: _collatz(v)),
    ("is_square", "int", "tell whether it is a perfect square", lambda v: int(v**0.5) ** 2 == v),
    ("multiples", "int", "return its first five multiples", lambda v: [v * i for i in range(1, 6)]),
)  # fmt: skip


def _fibonacci(count: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:count]


def _collatz(value: int) -> int:
    steps = 0
    while value != 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        steps += 1
    return steps
