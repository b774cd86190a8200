"""Write one HTML page on a run, or print its status; nothing is loaded from a network.

    python -m torchtitan_dp.report RUN [--output FILE.html] [--public]
    python -m torchtitan_dp.report RUN --status

RUN is a `job.dump_folder`, also of a run that is training. The page is RUN/report.html or, with
--public, RUN/report_public.html. What is computed from records is marked "not private" there;
--public leaves only what may be published.
"""

import os
import sys
from pathlib import Path

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("report", __doc__)

# isort: split
from torchtitan_dp.config.load import exit_on_mistake, fail
from torchtitan_dp.process import write_atomically
from torchtitan_dp.report.content import private_content, public_content
from torchtitan_dp.report.run_folder import as_text, open_run, status_rows
from torchtitan_dp.templates import templates


def report(folder: str, *, public: bool = False) -> str:
    """Return the page on a run; ValueError, one line, if there is none, or nothing to publish."""
    run = open_run(folder)
    content = public_content(run) if public else private_content(run)
    here = Path(__file__).parent
    pages = templates(here, here.with_name("release"), html=True)
    return pages.get_template("page.html.j2").render(content)


def main(argv: list[str]) -> None:
    options, _ = parsed("report", __doc__, argv)
    if options.status and (options.public or options.output):
        fail("--status: it writes no page; omit --public and --output")
    with exit_on_mistake():
        if options.status:
            run = open_run(options.run)
            print(as_text(options.run, status_rows(run), run.faults))
            return
        name = "report_public.html" if options.public else "report.html"
        path = options.output or os.path.join(options.run, name)
        if not path.endswith(".html") or os.path.isdir(path):
            raise ValueError(f"--output = '{path}': name a file that ends in .html")
        page = report(options.run, public=options.public)
        try:
            write_atomically(path, page.encode())
        except OSError as error:
            raise ValueError(f"--output = '{path}': cannot be written ({error})") from error
    what = "only what may be published" if options.public else "NOT PRIVATE: do not publish it"
    print(f"report: {path} ({what})", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
