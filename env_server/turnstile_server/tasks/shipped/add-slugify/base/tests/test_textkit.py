import unittest

from textkit import count_words, shorten


class TextkitTest(unittest.TestCase):
    def test_shorten(self) -> None:
        self.assertEqual(shorten("a long sentence", 9), "a long...")

    def test_count_words(self) -> None:
        self.assertEqual(count_words("a b A"), {"a": 2, "b": 1})


if __name__ == "__main__":
    unittest.main()
