"""Running a model through frontends, backends, engines and schedules, each engine in processes of its own.

The command line plans jobs, one for each (backend, engine), launches their processes one job after another, merges what
the ranks report, and shows it. A worker process reads its job as a line of JSON and reports in lines of JSON.
"""
