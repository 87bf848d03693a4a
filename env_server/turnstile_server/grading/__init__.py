"""Grading: rewards, computed on the host from work that is judged in a fresh sandbox, and never shown to the
agent.

Read ``protocol`` first (work, grade, and the seam for graders), then ``registry`` (the graders), ``grader`` and
``composition`` (one reward from all components), ``judged_copy`` (the sandbox in which a work is judged),
``hidden_tests`` with ``verdict`` and the programs in ``inside``, ``repository_tests``, ``script`` with
``script_reward``, ``answers`` and ``answer_entries``, ``work_files`` (files that graders are shown),
``environment_scores``, and ``validation`` with ``proof_works``, ``leaks`` and ``proof_report`` (the proof that a
task can be solved, and only by solving it). ``digest`` is of all that judges.
"""
