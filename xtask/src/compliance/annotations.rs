//! Finds the RFC annotations in source files.
//!
//! An annotation is a run of comment lines:
//!
//! ```text
//! //= rfc5044 section 4.1          the section; this line starts an annotation
//! //= type=test                    optional: `test` or `exception`; the default is code
//! //= reason=why it is left out    for an exception
//! //# quoted text of the RFC       one or more lines
//! ```
//!
//! An exception without a quote applies to its whole section, including all subsections. Exceptions
//! that belong to no line of code are in text files, in the same form.

/// The relation of the code to the quoted rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The code below the annotation obeys the rule.
    Implementation,
    /// The test below the annotation shows that the rule is obeyed.
    Test,
    /// The rule is deliberately not implemented.
    Exception,
}

/// One annotation as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Annotation {
    /// The RFC's number.
    pub(crate) rfc: u16,
    /// The section's number as in its heading.
    pub(crate) section: String,
    /// The relation of the code to the rule.
    pub(crate) kind: Kind,
    /// The reason of an exception. Empty for other kinds.
    pub(crate) reason: String,
    /// The quoted text, lines joined by line breaks. Empty only for an exception.
    pub(crate) quote: String,
    /// The file, relative to the root.
    pub(crate) file: String,
    /// The number of the line with the section, from 1.
    pub(crate) line: usize,
}

impl Annotation {
    /// Returns `file:line`.
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

/// Collects the annotations of one file. Messages about wrong annotations are added to `errors`.
pub(crate) fn collect(file: &str, text: &str, errors: &mut Vec<String>) -> Vec<Annotation> {
    let mut found = Vec::new();
    let mut open: Option<Annotation> = None;
    for (at, line) in text.lines().enumerate() {
        let line_number = at + 1;
        let line = line.trim();
        let problem = if let Some(meta) = line.strip_prefix("//=") {
            let meta = meta.trim();
            match (meta.split_once('='), &mut open) {
                (Some((key, value)), Some(annotation)) => {
                    set(annotation, key.trim(), value.trim()).err()
                }
                (Some(_), None) => Some("a type or reason without a section before it".to_owned()),
                (None, _) => {
                    close(&mut open, &mut found, errors);
                    match place(meta) {
                        Some((rfc, section)) => {
                            open = Some(Annotation {
                                rfc,
                                section,
                                kind: Kind::Implementation,
                                reason: String::new(),
                                quote: String::new(),
                                file: file.to_owned(),
                                line: line_number,
                            });
                            None
                        }
                        None => Some(format!("{meta:?} is not of the form `rfcNNNN section X.Y`")),
                    }
                }
            }
        } else if let Some(quote) = line.strip_prefix("//#") {
            match &mut open {
                Some(annotation) => {
                    annotation.quote.push_str(quote.trim());
                    annotation.quote.push('\n');
                    None
                }
                None => Some("a quote without a section before it".to_owned()),
            }
        } else {
            close(&mut open, &mut found, errors);
            None
        };
        errors.extend(problem.map(|problem| format!("{file}:{line_number}: {problem}")));
    }
    close(&mut open, &mut found, errors);
    found
}

/// Parses `rfc5044 section 4.1`.
fn place(text: &str) -> Option<(u16, String)> {
    let mut words = text.split_whitespace();
    let rfc = words.next()?.strip_prefix("rfc")?.parse().ok()?;
    let section = (words.next()? == "section").then(|| words.next())??;
    words
        .next()
        .is_none()
        .then(|| (rfc, section.trim_end_matches('.').to_owned()))
}

fn set(annotation: &mut Annotation, key: &str, value: &str) -> Result<(), String> {
    if !annotation.quote.is_empty() {
        return Err("a type or reason must be before the quote".to_owned());
    }
    match (key, value) {
        ("type", "test") => annotation.kind = Kind::Test,
        ("type", "exception") => annotation.kind = Kind::Exception,
        ("type", _) => {
            return Err(format!(
                "unknown type {value:?}; there are `test` and `exception`"
            ));
        }
        // A long reason may be given in several lines.
        ("reason", _) if annotation.reason.is_empty() => annotation.reason = value.to_owned(),
        ("reason", _) => {
            annotation.reason.push(' ');
            annotation.reason.push_str(value);
        }
        _ => {
            return Err(format!(
                "unknown key {key:?}; there are `type` and `reason`"
            ));
        }
    }
    Ok(())
}

/// Ends an annotation, and keeps it if it is complete.
fn close(open: &mut Option<Annotation>, found: &mut Vec<Annotation>, errors: &mut Vec<String>) {
    let Some(annotation) = open.take() else {
        return;
    };
    let exception = annotation.kind == Kind::Exception;
    let problem = if exception && annotation.reason.is_empty() {
        "an exception needs a reason"
    } else if !exception && annotation.quote.trim().is_empty() {
        "an annotation needs a quote"
    } else {
        found.push(annotation);
        return;
    };
    errors.push(format!("{}: {problem}", annotation.place()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good(text: &str) -> Vec<Annotation> {
        let mut errors = Vec::new();
        let found = collect("a.rs", text, &mut errors);
        assert_eq!(errors, Vec::<String>::new());
        found
    }

    fn problem(text: &str) -> String {
        let mut errors = Vec::new();
        collect("a.rs", text, &mut errors);
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors.remove(0)
    }

    #[test]
    fn annotation_keeps_place_and_lines() {
        let found = good(
            "fn f() {\n    //= rfc5044 section 4.1.\n    //# one\n    //#   two\n    g();\n}\n",
        );
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].rfc, found[0].section.as_str()), (5044, "4.1"));
        assert_eq!(found[0].quote, "one\ntwo\n");
        assert_eq!(found[0].kind, Kind::Implementation);
        assert_eq!(found[0].place(), "a.rs:2");
    }

    #[test]
    fn blocks_may_follow_each_other() {
        let found =
            good("//= rfc5040 section 1\n//= type=test\n//# a\n//= rfc5041 section A.1\n//# b\n");
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].kind, Kind::Test);
        assert_eq!((found[1].rfc, found[1].section.as_str()), (5041, "A.1"));
    }

    #[test]
    fn exception_may_cover_section() {
        let found = good(
            "//= rfc5040 section 8\n//= type=exception\n\
             //= reason=not for\n//= reason=this layer\n",
        );
        assert_eq!(found[0].kind, Kind::Exception);
        assert_eq!(found[0].reason, "not for this layer");
        assert!(found[0].quote.is_empty());
    }

    #[test]
    fn errors_name_the_line() {
        assert!(problem("//# lost\n").starts_with("a.rs:1: a quote without"));
        assert!(problem("//= type=test\n").contains("without a section"));
        assert!(problem("//= rfc5040 section 1\n").contains("needs a quote"));
        assert!(
            problem("//= rfc5040 section 1\n//= type=exception\n//# q\n")
                .contains("needs a reason")
        );
        assert!(problem("//= rfc5040 section 1\n//= type=maybe\n//# q\n").contains("unknown type"));
        assert!(problem("//= rfc5040 section 1\n//= kind=test\n//# q\n").contains("unknown key"));
        assert!(
            problem("//= rfc5040 section 1\n//# q\n//= type=test\n").contains("before the quote")
        );
        assert!(problem("//= rfcABC section 1\n").contains("not of the form"));
        assert!(problem("//= rfc5040 section 1 and 2\n").contains("not of the form"));
    }
}
