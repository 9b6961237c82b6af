"""Templates, topics and small functions from which `make_prompts.py` composes prompts."""

from __future__ import annotations

import math
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
    "Write a short scene in which a {job} and {name} argue about {topic} in {place}.",
    "Continue this story: {name} opened the old {thing} and could not believe it.",
    "Write a diary entry of a {job} in {place} who has lost a {thing}.",
    "Write a limerick about a {job} and a {thing}.",
    "Write a song about {topic} with a chorus and {n} verses.",
    "Write a news report: a {job} from {place} wins a prize for work on {topic}.",
    "Write a résumé for {name}, a {job} with {n} years of experience.",
    "Write a complaint to a shop in {place} that sold {name} a bad {thing}.",
    "Answer as a pirate: what do you think about {topic}?",
    "Be a strict {job} and criticise this plan: spend {n} years on {topic} and sell one {thing}.",
    "You are a machine that loves {topic}. Introduce yourself to a {job}.",
    "Act as an interviewer and ask a {job} {n} questions about {topic}.",
    "Explain {topic} as a {job} would, with an example from daily life.",
    "Explain the difference between correlation and causation with {topic} and {other}.",
    "What evidence would change your mind about {topic}?",
    "Which three ideas does everyone need in order to understand {topic}?",
    "Define {topic} in one sentence, then in one paragraph.",
    "Describe the life of a {job} in {place} two hundred years ago.",
    "How would {topic} look on another planet?",
    "How do scientists measure {topic}?",
    "What does current research say about {topic}?",
    "Give a timeline of {topic} with {n} entries.",
    "Name {n} jobs that need knowledge of {topic}, and say why.",
    "Make a list of {n} questions that I should ask a {job} about {topic}.",
    "Make a checklist for a {job} who travels to {place} with a {thing}.",
    "Make a weekly plan for learning {topic} in {n} weeks.",
    "Turn these notes into a paragraph: {topic}; {place}; {n} people; a {thing}; {name} was late.",
    'Give the sentiment (positive, negative or mixed) of: "The {thing} from {place} was cheap, but '
    'the {job} was rude to {name}."',
    'Give a JSON object with the keys name, job, city and count for: "{name}, a {job} in {place}, '
    'owns {n} {thing}s."',
    "Write this as a CSV table: {name} bought {n} {thing}s, the {job} bought 3, and Kim bought 12.",
    'Find the mistakes: "In {place} there is {n} {thing}, and {name} have seen they all."',
    'Put this into the past tense: "{name} works as a {job} in {place} and sells {n} {thing}s."',
    'Summarize in one sentence: "{name} moved to {place} to learn about {topic}. After {n} years '
    'as a {job}, {name} opened a small shop for {thing}s, and now many people visit it."',
    'Which words in this sentence are nouns? "The {job} gave {name} a {thing} in {place}."',
    "If every {job} owns a {thing} and {name} is a {job}, what do we know about {name}?",
    "{name}, Kim and Lee sit in a row. Kim is left of {name}, and Lee is right of {name}. Who sits "
    "in the middle, and why?",
    "A {thing} is heavier than a coin and lighter than a chair. Put the three in order of weight.",
    "You have a {thing}, a rope and {n} coins. How could you use them to learn about {topic}?",
    "What is the next number: {n}, {n}0, {n}00? Explain the rule.",
    "Convert {n} miles to kilometres and {n} pounds to kilograms, step by step.",
    "Explain how to compute {n} percent of a price of ${n}50.",
    "Prove that the sum of two even numbers is even.",
    "Explain the Pythagorean theorem with a triangle of sides {n}, a and b.",
    "What is the derivative of x^{n}, and what does it mean?",
    "A fair coin is tossed {n} times. What is the chance of only heads?",
    "Write a Python script that reads a file and counts the lines that contain {thing}.",
    "Write a Python function that returns every {n}th word of a text about {topic}.",
    "Write a Python class for a queue of {thing}s with tests.",
    "Write a C++ program that sorts {n} names and prints them.",
    "Write a bash command that finds all files with {thing} in their name.",
    "Write a Java method that checks whether a list contains the word {thing}.",
    "Write a regular expression that matches a date, and explain it to a {job}.",
    "Implement a binary search in Python and explain its speed with {n}000 items.",
    "Explain recursion to a {job} with a Python example about {thing}s.",
    "What does this Python code print, and why? print([{n} * i for i in range({n})])",
    'Fix this Python code: "for i in range({n}) print({thing}s[i])"',
    "Explain what an API is to {name}, who works as a {job}.",
    "How do I install and use a library for {topic} in Python?",
    "What is the capital of the country of {place}, and what is it known for?",
    "Recommend a {thing} for a {job} with a budget of ${n}0.",
    "How should a {job} prepare for an exam about {topic}?",
    "Help me to write a message to {name}: I cannot come to {place}, because my {thing} is broken.",
    "Thank you for the help with {topic}! Can you give me one more example?",
    "hi, can you explain {topic} pls",
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

PROBLEMS = (
    "{name} buys {a} boxes with {b} {thing}s each and gives {c} {thing}s to {other}. "
    "How many {thing}s does {name} have left?",
    "A {job} in {place} works {a} hours a day for {b} days and earns ${c} an hour. "
    "How much money does the {job} earn in total?",
    "{name} had {total} {thing}s. {other} took {c} of them, and the rest were put into {b} bags "
    "equally. How many {thing}s are in each bag?",
    "Each {thing} costs ${c} and each {second} costs ${b}. {name} buys {a} {thing}s and {c} "
    "{second}s. How much does {name} pay?",
    "{name} is {a} years older than {other}. In {b} years {name} will be {c} times as old as "
    "{other} was {b} years ago. Explain how to find {other}'s age.",
    "A train travels {a} miles in the first hour and {b} miles more in every following hour. How "
    "far has it gone after {c} hours?",
    "{name} reads {a} pages on Monday, twice as many on Tuesday and {b} fewer on Wednesday than on "
    "Tuesday. How many pages did {name} read in these three days?",
    "There are {total} people in {place}. {b} of them own a {thing} and {c} own a {second}. What "
    "is the probability that a person picked at random owns a {thing}?",
    "Solve for x: {a}x + {b} = {total}. Show every step.",
    "If f(x) = {a}x^2 - {b}x + {c}, what is f({c})?",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
    "{name} saves ${a} every week. A {thing} costs ${total}. After how many weeks can {name} buy "
    "it, if {other} adds ${c} at the start?",
    "A shop in {place} sold {a} {thing}s in the morning, and {b} times as many in the afternoon. "
    "It began the day with {stock}. How many {thing}s are left in the evening?",
    "{name} and {other} share {total} {thing}s so that {name} gets {c} more than {other}. "
    "How many does each of them get?",
    "A {job} needs {b} minutes for one {thing}. How many hours does the {job} need for {a}0 of them, "
    "with a break of {c} minutes after every tenth?",
    "A {thing} that costs ${total} gets {c}0% cheaper, and then ${b} more expensive. What does it "
    "cost now?",
    "{a} friends travel to {place}. The bus costs ${b} per person, the hotel ${total} for all of "
    "them together. What does each of them pay?",
    "{name} walks {a} km in {b} hours, {other} walks {c} km in one hour. Who is faster, and by how "
    "much?",
    "On a farm near {place} there are {a} cows and {b} times as many hens. How many legs do these "
    "animals have altogether?",
    "{name} bakes {a} trays of {b} cakes. {c} cakes burn, and half of the others are sold for $2 "
    "each. How much money does {name} take?",
    "A tank holds {total} liters. Every minute {a} liters flow in and {c} liters flow out. How long "
    "does it take to fill the tank, if it is empty now?",
    "The average of four numbers is {a}. Three of them are {b}, {c} and {a}. What is the fourth?",
    "{name} has {a} coins of 5 cents, {b} of 10 cents and {c} of 25 cents. How many dollars is "
    "that?",
    "A class has {a} girls and {b} boys. {c} of the children wear glasses. What fraction of the "
    "class does not wear glasses?",
    "{name} wrote {a} letters on Monday. Every following day {name} wrote {c} more than on the day "
    "before. How many letters were written by Friday evening?",
    "Twice a number plus {b} is {total}. What is the number?",
    "A rope of {total} meters is cut into {c} pieces of {a} meters and one last piece. How long is "
    "the last piece?",
    "{name} pays ${a} a month for a phone and ${b} a month for music. How much is that in {c} "
    "years?",
    "A cinema in {place} has {a} rows of {b} seats. {total} tickets cost ${c} each. How much money "
    "does a full house bring, if the first row is free?",
    "{name} drinks {a} cups of tea a week, and {other} drinks {b} cups more. How many cups do they "
    "drink together in {c} weeks?",
    "It takes {a} workers {b} days to build a wall. How many days do {c} workers need?",
    "{name} plants {a} trees in each of {b} gardens. A storm breaks {c} trees. What percentage of "
    "the trees still stands?",
    "Of {total} {thing}s, one third is red, {c} are blue and the others are green. How many are "
    "green?",
    "{name} runs {a} laps of {b}00 meters. {other} runs {c} laps more. How many kilometers do both "
    "run together?",
    "What is {a} * {b} - {c}? Explain the steps.",
    "What is {total} divided by {c}, and what is the remainder?",
    "Simplify ({a}x + {b}) - ({c}x - {a}).",
    "A square has a perimeter of {a}0 cm. Find its area.",
    "How many ways are there to choose {c} of {b} {thing}s? Explain it.",
    "A car needs {c} liters for 100 km. A liter costs ${b}. What does a trip of {a}00 km cost?",
    "{name} is half as old as {other}, who is {a} years younger than a {job} of {total} years. How "
    "old is {name}?",
    "The sum of three consecutive numbers is {triple}. Which numbers are they?",
)

# ruff: noqa: E501 - a table
# name, kind of the first argument, name of the second, the order in words, the function itself
PAIRED = (
    ("above", "list", "limit", "keep the numbers that are greater than {0}", lambda v, n: [x for x in v if x > n]),
    ("below", "list", "limit", "keep the numbers that are smaller than {0}", lambda v, n: [x for x in v if x < n]),
    ("count_of", "list", "wanted", "return how often {0} occurs", lambda v, n: v.count(n)),
    ("add_to_all", "list", "amount", "add {0} to every number", lambda v, n: [x + n for x in v]),
    ("scale", "list", "factor", "multiply every number by {0}", lambda v, n: [x * n for x in v]),
    ("first_items", "list", "count", "return the first {0} numbers", lambda v, n: v[:n]),
    ("last_items", "list", "count", "return the last {0} numbers in the same order", lambda v, n: v[-n:]),
    ("rotate_left", "list", "places", "rotate the numbers to the left by {0} places", lambda v, n: v[n % len(v) :] + v[: n % len(v)]),
    ("chunks", "list", "size", "split the numbers into lists of {0} numbers, the last may be shorter", lambda v, n: [v[i : i + n] for i in range(0, len(v), n)]),
    ("without", "list", "unwanted", "remove every number equal to {0}", lambda v, n: [x for x in v if x != n]),
    ("contains", "list", "wanted", "tell whether {0} is one of the numbers", lambda v, n: n in v),
    ("nth_largest", "list", "rank", "return the largest number but for {0} larger ones, or None", lambda v, n: sorted(v)[::-1][n] if n < len(v) else None),
    ("multiples_of", "list", "divisor", "keep the numbers that {0} divides", lambda v, n: [x for x in v if x % n == 0]),
    ("remainders", "list", "divisor", "return the remainders of the numbers after division by {0}", lambda v, n: [x % n for x in v]),
    ("pair_sums", "list", "total", "tell whether two different places hold numbers whose sum is {0}", lambda v, n: any(x + y == n for i, x in enumerate(v) for y in v[i + 1 :])),
    ("clip", "list", "limit", "replace all numbers above {0} by {0}", lambda v, n: [min(x, n) for x in v]),
    ("moving_sum", "list", "width", "return the sums of all {0} neighbouring numbers", lambda v, n: [sum(v[i : i + n]) for i in range(len(v) - n + 1)]),
    ("repeat", "str", "times", "repeat it {0} times, separated by spaces", lambda v, n: " ".join([v] * n)),
    ("truncate", "str", "length", "return its first {0} characters", lambda v, n: v[:n]),
    ("pad", "str", "width", "add dots at the end until it has {0} characters", lambda v, n: v.ljust(n, ".")),
    ("long_words", "str", "length", "return the words with more than {0} letters", lambda v, n: [w for w in v.split() if len(w) > n]),
    ("every_nth", "str", "step", "return every character whose index is a multiple of {0}", lambda v, n: v[::n]),
    ("shift_letters", "str", "places", "move each lower-case letter {0} places on in the alphabet, after z comes a", lambda v, n: "".join(chr((ord(c) - 97 + n) % 26 + 97) if c.islower() else c for c in v)),
    ("split_text", "str", "size", "split it into parts of {0} characters", lambda v, n: [v[i : i + n] for i in range(0, len(v), n)]),
    ("power", "int", "exponent", "raise it to the power {0}", lambda v, n: v**n),
    ("is_multiple", "int", "divisor", "tell whether it is a multiple of {0}", lambda v, n: v % n == 0),
    ("greatest_divisor", "int", "other", "return the greatest common divisor of it and {0}", lambda v, n: math.gcd(v, n)),
    ("least_multiple", "int", "other", "return the least common multiple of it and {0}", lambda v, n: math.lcm(v, n)),
    ("to_base", "int", "base", "return its digits in base {0}, the highest first", lambda v, n: _digits(v, n)),
    ("count_up", "int", "step", "return all numbers from 0 up to it in steps of {0}", lambda v, n: list(range(0, v + 1, n))),
    ("round_up", "int", "step", "round it up to a multiple of {0}", lambda v, n: -(-v // n) * n),
    ("digit_count", "int", "digit", "return how often the digit {0} occurs in it", lambda v, n: str(v).count(str(n))),
)  # fmt: skip
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
    ("negate", "list", "change the sign of every number", lambda v: [-x for x in v]),
    ("cubes", "list", "raise every number to the third power", lambda v: [x**3 for x in v]),
    ("product", "list", "return the product of all numbers", lambda v: math.prod(v)),
    ("median", "list", "return the middle number of the sorted list, the lower one of two", lambda v: sorted(v)[(len(v) - 1) // 2]),
    ("halves", "list", "divide every number by two and round down", lambda v: [x // 2 for x in v]),
    ("first_and_last", "list", "return a tuple of the first and the last number", lambda v: (v[0], v[-1])),
    ("split_even_odd", "list", "return a list of the even and a list of the odd numbers", lambda v: ([x for x in v if x % 2 == 0], [x for x in v if x % 2])),
    ("running_max", "list", "return the largest number so far at each place", lambda v: [max(v[: i + 1]) for i in range(len(v))]),
    ("count_negative", "list", "return how many numbers are below zero", lambda v: sum(x < 0 for x in v)),
    ("with_index", "list", "return pairs of index and number", lambda v: list(enumerate(v))),
    ("frequencies", "list", "count every number in a dictionary", lambda v: {x: v.count(x) for x in v}),
    ("swap_ends", "list", "exchange the first and the last number", lambda v: [v[-1], *v[1:-1], v[0]]),
    ("peaks", "list", "return the numbers that are larger than both neighbours", lambda v: [b for a, b, c in zip(v, v[1:], v[2:], strict=False) if a < b > c]),
    ("swap_case", "str", "turn lower case into upper case and the reverse", str.swapcase),
    ("count_consonants", "str", "return the number of consonants", lambda v: sum(c.isalpha() and c not in "aeiou" for c in v)),
    ("double_letters", "str", "write every letter twice", lambda v: "".join(2 * c for c in v)),
    ("words_by_length", "str", "sort the words by length", lambda v: sorted(v.split(), key=len)),
    ("last_letters", "str", "return the last letter of every word", lambda v: "".join(w[-1] for w in v.split())),
    ("snake_case", "str", "replace spaces by underscores", lambda v: v.replace(" ", "_")),
    ("distinct_letters", "str", "return the number of different letters", lambda v: len(set(v) - {" "})),
    ("word_lengths", "str", "return the length of each word", lambda v: [len(w) for w in v.split()]),
    ("letter_codes", "str", "return the character code of every character", lambda v: [ord(c) for c in v]),
    ("triangular", "int", "return the sum of all numbers up to it", lambda v: v * (v + 1) // 2),
    ("reverse_digits", "int", "reverse its digits", lambda v: int(str(v)[::-1])),
    ("prime_factors", "int", "return its prime factors in ascending order", lambda v: _prime_factors(v)),
    ("primes_below", "int", "return all prime numbers below it", lambda v: [p for p in range(2, v) if all(p % d for d in range(2, p))]),
    ("count_down", "int", "return all numbers from it down to one", lambda v: list(range(v, 0, -1))),
    ("odd_sum", "int", "return the sum of all odd numbers below it", lambda v: sum(range(1, v, 2))),
    ("is_even", "int", "tell whether it is even", lambda v: v % 2 == 0),
    ("ones_in_binary", "int", "return the number of ones in its binary notation", lambda v: bin(v).count("1")),
    ("multiplication_row", "int", "return its products with the numbers from one to ten", lambda v: [v * i for i in range(1, 11)]),
    ("hexadecimal", "int", "return it in hexadecimal notation", lambda v: hex(v)[2:]),
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


def _digits(value: int, base: int) -> list[int]:
    digits = []
    while value and base > 1:
        digits.append(value % base)
        value //= base
    return digits[::-1]


def _prime_factors(value: int) -> list[int]:
    factors, divisor = [], 2
    while value > 1:
        while value % divisor == 0:
            factors.append(divisor)
            value //= divisor
        divisor += 1
    return factors
