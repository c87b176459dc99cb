"""``penstock reproduce``: the experiments of the papers, and the page that compares their results with ours."""
