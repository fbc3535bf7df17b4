"""Pages in a browser without a window: Chromium, as the extra "browser" installs it with Qt.

python tests/browser.py PAGE [SCRIPT [PICTURE]]    # prints the page's document after a script, and takes a picture
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

SIZE = 1400, 1200
SECONDS = 60
QUIET = 0.3
"""Seconds that a page is left alone after the script, to draw."""


def document(page: pathlib.Path, script: str = "", picture: pathlib.Path | None = None) -> str:
    """Returns the document of a page after a script has run in it; saves a picture of its upper part.

    Skips the test where there is no browser. What the page complains about on its console is an AssertionError.
    """
    import pytest

    if importlib.util.find_spec("PySide6") is None:
        pytest.skip('no browser: pip install -e ".[browser]"')
    command = [sys.executable, __file__, str(page), script, *([] if picture is None else [str(picture)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    if "ImportError" in done.stderr:  # a library of the system is missing
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("console: ")]
    assert not said, said
    return done.stdout


def main(page: str, script: str = "", picture: str = "") -> int:
    """Loads a page, runs a script and prints the document."""
    os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --no-sandbox")
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):  # the name is Qt's
            print(f"console: {message} ({source}:{line})", file=sys.stderr)

    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    shown = Page(view)
    view.setPage(shown)
    view.resize(*SIZE)
    view.show()

    def finish(text: str) -> None:
        sys.stdout.write(text)
        if picture:
            view.grab().save(picture)
        app.quit()

    def loaded(ok: bool) -> None:
        if ok:
            later = lambda _: QTimer.singleShot(int(1000 * QUIET), lambda: shown.toHtml(finish))
            shown.runJavaScript(script or "0", 0, later)
        else:
            print(f"{page} does not load", file=sys.stderr)
            app.exit(1)

    shown.loadFinished.connect(loaded)
    shown.load(QUrl.fromLocalFile(str(pathlib.Path(page).resolve())))
    QTimer.singleShot(1000 * SECONDS, lambda: app.exit(2))
    return app.exec()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
