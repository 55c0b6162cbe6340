"""Sphinx's settings. `sphinx-build -W --keep-going docs site` builds the site."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "turnrl"
version = release = version_of("turnrl")
html_title = f"turnrl {version}"
copyright = "the authors of turnrl"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "turnrl_site",
]
exclude_patterns = ["_ext"]
root_doc = "index"
# docstrings write `code` as Markdown does
default_role = "literal"
smartquotes = False

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["turnrl.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-code-background": "#f4f5f7"},
    "dark_css_variables": {"color-code-background": "#202226"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
# prompts and output are not for the clipboard
copybutton_selector = "div.highlight:not(.highlight-text *) pre"
