import tempfile
import unittest
from pathlib import Path

from tables import csvfile


class CsvFileTest(unittest.TestCase):
    def test_what_is_written_is_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "t.csv")
            csvfile.write(path, ["a", "b"], [{"a": "1", "b": "x, y"}])
            self.assertEqual(csvfile.read(path), [{"a": "1", "b": "x, y"}])


if __name__ == "__main__":
    unittest.main()
