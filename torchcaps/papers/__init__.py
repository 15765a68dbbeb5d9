"""The five papers: every table and figure of theirs, run from one command, beside what was published.

>>> [paper.name for paper in list_papers()]
['sabour2017', 'choi2019', 'tsai2020', 'chen2019', 'yang2021']
"""

from torchcaps.papers.registry import find_paper, list_papers

__all__ = ["find_paper", "list_papers"]
