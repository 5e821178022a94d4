"""Every sampled test has cases in `make test`, and what that leaves out is a sweep."""

import pytest

from tests.sampling import choose_cases


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("every", [1, 2, 4, 20])
def test_of_the_cases_of_a_test_some_are_chosen(count, every):
    for name in ("test_a", "test_b", "test_c"):
        kept = choose_cases(name, count, every)
        assert max(1, count // every) <= len(kept) <= -(-count // every)
        assert {*kept} <= {*range(count)}


def test_other_tests_choose_other_cases():
    assert len({choose_cases(f"test_{number}", 8, 4) for number in range(20)}) == 4


@pytest.mark.parametrize(
    ("expression", "count"), [("not slow and not sweep", 3), ("sweep and not slow", 7), ("slow", 1)]
)
def test_each_case_is_in_one_of_the_runs(tmp_path, expression, count, capsys):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from tests.sampling import mark_sweeps\n"
        "def pytest_configure(config):\n"
        "    for name in ('slow', 'sweep', 'sampled'):\n"
        "        config.addinivalue_line('markers', f'{name}: for this test')\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    mark_sweeps(items)\n"
    )
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.sampled(4)\n"
        "@pytest.mark.parametrize('k', [*range(8), pytest.param(8, marks=pytest.mark.slow)])\n"
        "def test_many(k): pass\n"
        "@pytest.mark.sweep\n"
        "def test_whole(): pass\n"
        "def test_usual(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider", "--import-mode=importlib"]
    pytest.main(
        [*options, "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "-m", expression, str(tmp_path)]
    )
    assert capsys.readouterr().out.count("test_one.py::") == count
