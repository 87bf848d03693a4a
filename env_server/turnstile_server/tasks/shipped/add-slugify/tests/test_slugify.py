import unittest

import textkit
from textkit import count_words, shorten, slugify


class Slugify(unittest.TestCase):
    def test_the_example(self) -> None:
        self.assertEqual(slugify("Crème brûlée, 2 ways!"), "creme-brulee-2-ways")

    def test_plain_words(self) -> None:
        self.assertEqual(slugify("Hello World"), "hello-world")

    def test_runs_become_one_dash(self) -> None:
        self.assertEqual(slugify("a  --  b__c...d"), "a-b-c-d")

    def test_no_dash_at_the_ends(self) -> None:
        self.assertEqual(slugify("  (draft) "), "draft")

    def test_accents_are_lost(self) -> None:
        self.assertEqual(slugify("Ångström ÀÉÎÕÜ ñç"), "angstrom-aeiou-nc")

    def test_other_scripts_are_no_letters(self) -> None:
        self.assertEqual(slugify("東京 2020"), "2020")

    def test_nothing_left(self) -> None:
        self.assertEqual(slugify("?!"), "untitled")
        self.assertEqual(slugify(""), "untitled")

    def test_it_is_in_its_module(self) -> None:
        from textkit.slugs import slugify as same

        self.assertIs(textkit.slugify, same)

    def test_the_rest_still_works(self) -> None:
        self.assertEqual(shorten("a long sentence", 9), "a long...")
        self.assertEqual(count_words("a b A"), {"a": 2, "b": 1})
