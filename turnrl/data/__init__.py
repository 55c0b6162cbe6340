"""Question sets: files, folders and objects of `datasets`, known data sets, the Hugging Face hub.

sources         the questions of a data set, from any source
known           files, the known data sets by short name, and the hub
fields          the questions made of rows
files           rows of files of questions and of passages
rows            rows of the hub, and the text of a value
functions       questions from a user's function
paragraphs      `HotpotParagraphs`, `SquadParagraphs`: questions with paragraphs that answer them
"""
