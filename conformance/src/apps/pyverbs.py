"""Runs rdma-core's tests and writes a line for each test: result, name, and reason.

Arguments: the directory of the tests, the output file, and the arguments of the tests' own
run_tests.py.
"""
import sys
import unittest
from importlib.machinery import SourceFileLoader

directory, output = sys.argv[1:3]
sys.argv[1:] = sys.argv[3:]
sys.path.insert(0, directory)
tests = SourceFileLoader('tests', directory + '/__init__.py').load_module()

from args_parser import parser  # noqa: E402  (it is in the directory)

parser.parse_args()


class Report(unittest.TestResult):
    """Writes each result at once, so that no result is lost if a test crashes."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def report(self, what, test, why=''):
        name = test.id().removeprefix('tests.')
        why = ' '.join(str(why).split())
        self.file.write(f'{what}\t{name}\t{why}\n')
        self.file.flush()

    def addSuccess(self, test):
        self.report('passed', test)

    def addSkip(self, test, reason):
        self.report('skipped', test, reason)

    def addError(self, test, err):
        self.report('failed', test, repr(err[1]))

    def addFailure(self, test, err):
        self.report('failed', test, repr(err[1]))


suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
with open(output, 'w', encoding='utf-8') as file:
    count = suite.countTestCases()
    suite.run(Report(file))
    file.write(f'end\t{count}\t\n')
