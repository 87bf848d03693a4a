import unittest
from pathlib import Path

from tables.join import columns_of, join
from turnstile_tests import python, run, shared_folder

PEOPLE = [
    {"name": "Ann", "city": "Oslo", "note": "a"},
    {"name": "Bo", "city": "Rome", "note": "b"},
    {"name": "Cy", "city": "Lima", "note": "c"},
    {"name": "Di", "city": "Oslo", "note": "d"},
]
CITIES = [
    {"city": "Rome", "country": "Italy", "note": "r"},
    {"city": "Oslo", "country": "Norway", "note": "o"},
    {"city": "Oslo", "country": "USA", "note": "u"},
]


class Columns(unittest.TestCase):
    def test_order_and_names(self) -> None:
        self.assertEqual(columns_of(PEOPLE, CITIES, "city"), ["name", "city", "note", "country", "note_2"])

    def test_an_empty_table_has_none(self) -> None:
        self.assertEqual(columns_of(PEOPLE, [], "city"), ["name", "city", "note"])
        self.assertEqual(columns_of([], [], "city"), [])


class Join(unittest.TestCase):
    def test_every_pair_in_order(self) -> None:
        rows = join(PEOPLE, CITIES, "city")
        self.assertEqual(
            [(row["name"], row["country"], row["note"], row["note_2"]) for row in rows],
            [("Ann", "Norway", "a", "o"), ("Ann", "USA", "a", "u"), ("Bo", "Italy", "b", "r"),
             ("Di", "Norway", "d", "o"), ("Di", "USA", "d", "u")],
        )
        self.assertEqual(set(rows[0]), {"name", "city", "note", "country", "note_2"})

    def test_rows_without_a_partner_can_be_kept(self) -> None:
        rows = join(PEOPLE, CITIES, "city", keep_left=True)
        self.assertEqual([row["name"] for row in rows], ["Ann", "Ann", "Bo", "Cy", "Di", "Di"])
        self.assertEqual(rows[3], {"name": "Cy", "city": "Lima", "note": "c", "country": "", "note_2": ""})

    def test_empty_tables(self) -> None:
        self.assertEqual(join([], CITIES, "city"), [])
        self.assertEqual(join(PEOPLE, [], "city"), [])
        self.assertEqual(join(PEOPLE, [], "city", keep_left=True), PEOPLE)

    def test_a_missing_column_is_an_error(self) -> None:
        with self.assertRaises(KeyError):
            join(PEOPLE, [{"town": "Oslo"}], "city")
        with self.assertRaises(KeyError):
            join([{"town": "Oslo"}], CITIES, "city")

    def test_the_tables_stay_as_they_are(self) -> None:
        people = [dict(row) for row in PEOPLE]
        cities = [dict(row) for row in CITIES]
        join(people, cities, "city", keep_left=True)
        self.assertEqual((people, cities), (PEOPLE, CITIES))


class Command(unittest.TestCase):
    def test_it_writes_the_joined_table(self) -> None:
        with shared_folder() as folder:
            people, cities, out = (Path(folder, name) for name in ("p.csv", "c.csv", "out.csv"))
            people.write_text("name,city\nAnn,Oslo\nCy,Lima\n")
            cities.write_text("city,country\nOslo,Norway\n")
            argv = [python, "-m", "tables", "join", people, cities, "--on", "city", "--left", "--out", out]
            run(argv, check=True, timeout=20)
            self.assertEqual(out.read_text(), "name,city,country\nAnn,Oslo,Norway\nCy,Lima,\n")
