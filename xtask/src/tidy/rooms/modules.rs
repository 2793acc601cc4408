//! The modules of a crate, the paths in their code, and the modules that these resolve to.

use std::collections::{BTreeMap, BTreeSet};

use super::table::Arrows;
use super::tokens::{Token, tokens};

/// The names of a path, usually from the root of the crate.
type Path = Vec<String>;

/// The maximum number of re-exports that are followed. It stops the search if they form a cycle.
const REEXPORTS_MAX: usize = 16;

/// The modules of a crate. Modules inside a file count as parts of that file.
#[derive(Default)]
pub(super) struct Modules {
    known: BTreeSet<Path>,
    /// The imports and re-exports of each module: the target of each name.
    imports: BTreeMap<(Path, String), Path>,
    /// The modules and the paths in their code, as written.
    paths: BTreeSet<(Path, Path)>,
}

impl Modules {
    /// Adds a file by its path below `src`.
    pub(super) fn add(&mut self, path: &[&str], text: &str) {
        let is_test = |part: &&str| {
            let name = part.strip_suffix(".rs").unwrap_or(part);
            matches!(name, "tests" | "test" | "testing") || name.ends_with("_tests")
        };
        if path.iter().any(is_test) || path.first() == Some(&"bin") {
            return;
        }
        let mut module: Path = path
            .iter()
            .map(|part| part.strip_suffix(".rs").unwrap_or(part).to_owned())
            .collect();
        let is_root = |name: &String| matches!(name.as_str(), "mod" | "lib" | "main");
        if module.last().is_some_and(is_root) {
            module.pop();
        }
        self.known.insert(module.clone());
        let scan = Scan {
            modules: self,
            file: module,
            inline: Vec::new(),
            depth: 0,
        };
        scan.run(&tokens(text));
    }

    /// Returns the rooms that each room names.
    pub(super) fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for module in &self.known {
            if let Some(room) = module.first() {
                arrows.entry(room.clone()).or_default();
            }
        }
        for (module, path) in &self.paths {
            let (Some(from), Some(to)) = (module.first(), self.resolve(module, path)) else {
                continue;
            };
            if let Some(to) = to.first().filter(|to| *to != from) {
                let written = format!("{} in {}", path.join("::"), module.join("/"));
                let arrows = arrows.entry(from.clone()).or_default();
                arrows.entry(to.clone()).or_insert(written);
            }
        }
        arrows
    }

    /// Returns the module that defines the item of a path in `module`. Returns `None` for paths
    /// into other crates.
    fn resolve(&self, module: &[String], path: &[String]) -> Option<Path> {
        let mut rest: Path = absolute(module, path)
            .or_else(|| self.imported(module, path))
            .or_else(|| self.child(module, path))?;
        for _ in 0..REEXPORTS_MAX {
            let depth = (0..=rest.len())
                .rev()
                .find(|depth| self.known.contains(&rest[..*depth]))?;
            let (parent, names) = rest.split_at(depth);
            let target = names.split_first().and_then(|(name, suffix)| {
                let target = self.imports.get(&(parent.to_vec(), name.clone()))?;
                let mut whole = absolute(parent, target).or_else(|| self.child(parent, target))?;
                whole.extend_from_slice(suffix);
                Some(whole)
            });
            match target {
                Some(target) => rest = target,
                None => return Some(parent.to_vec()),
            }
        }
        None
    }

    /// Returns the path from the root if its first name is an import of the module.
    fn imported(&self, module: &[String], path: &[String]) -> Option<Path> {
        let (first, suffix) = path.split_first()?;
        let target = self.imports.get(&(module.to_vec(), first.clone()))?;
        let mut whole = absolute(module, target)?;
        whole.extend_from_slice(suffix);
        Some(whole)
    }

    /// Returns the path from the root if its first name is a module inside of this one.
    fn child(&self, module: &[String], path: &[String]) -> Option<Path> {
        let mut whole = module.to_vec();
        whole.push(path.first()?.clone());
        if !self.known.contains(&whole) {
            return None;
        }
        whole.extend_from_slice(&path[1..]);
        Some(whole)
    }
}

/// Returns the path from the root if it begins with `crate`, `self` or `super`.
fn absolute(module: &[String], path: &[String]) -> Option<Path> {
    let mut whole = module.to_vec();
    let mut names = path;
    match names.first()?.as_str() {
        "crate" => whole.clear(),
        "self" => {}
        "super" => {
            while let Some(("super", rest)) = names.split_first().map(|(n, r)| (n.as_str(), r)) {
                whole.pop();
                names = rest;
            }
            whole.extend_from_slice(names);
            return Some(whole);
        }
        _ => return None,
    }
    whole.extend_from_slice(&names[1..]);
    Some(whole)
}

/// Reads the tokens of one file.
struct Scan<'a> {
    modules: &'a mut Modules,
    file: Path,
    /// The inline modules around the next token, each with the depth of its braces.
    inline: Vec<(String, usize)>,
    depth: usize,
}

impl Scan<'_> {
    fn run(mut self, tokens: &[Token]) {
        let mut index = 0;
        while let Some(token) = tokens.get(index) {
            let rest = &tokens[index..];
            index += match token {
                Token::Name(word) if word == "use" => self.import(&rest[1..]) + 1,
                Token::Name(word) if word == "mod" => self.inline_module(&rest[1..]) + 1,
                Token::Name(_) => self.path(rest),
                Token::Mark(mark) => {
                    self.brace(*mark);
                    1
                }
                Token::Colons => 1,
            };
        }
    }

    fn brace(&mut self, mark: char) {
        match mark {
            '{' => self.depth += 1,
            '}' => {
                self.depth = self.depth.saturating_sub(1);
                self.inline.retain(|(_, depth)| *depth <= self.depth);
            }
            _ => {}
        }
    }

    /// Enters an inline module, if `mod` starts one. Returns how many tokens were read.
    fn inline_module(&mut self, tokens: &[Token]) -> usize {
        if let [Token::Name(name), Token::Mark('{'), ..] = tokens {
            self.depth += 1;
            self.inline.push((name.clone(), self.depth));
            return 2;
        }
        0
    }

    /// Converts a path in an inline module to a path in the file's module: one `super` is removed
    /// for each inline module. Returns `None` for a path to an item of this file.
    fn in_file(&self, path: &[String]) -> Option<Path> {
        let supers = path.iter().take_while(|name| *name == "super").count();
        if self.inline.is_empty() || supers == 0 {
            return Some(path.to_vec());
        }
        (supers > self.inline.len()).then(|| path[self.inline.len()..].to_vec())
    }

    fn add_path(&mut self, path: &[String]) {
        if let Some(path) = self.in_file(path) {
            self.modules.paths.insert((self.file.clone(), path));
        }
    }

    /// Reads a path in code. Returns how many tokens it has.
    fn path(&mut self, tokens: &[Token]) -> usize {
        let mut names = Path::new();
        let mut read = 0;
        while let Some(Token::Name(name)) = tokens.get(read) {
            names.push(name.clone());
            read += 1;
            let next_is_name = matches!(tokens.get(read + 1), Some(Token::Name(_)));
            if tokens.get(read) != Some(&Token::Colons) || !next_is_name {
                break;
            }
            read += 1;
        }
        if names.len() > 1 {
            self.add_path(&names);
        }
        read
    }

    /// Reads what follows `use`. Returns how many tokens it has.
    fn import(&mut self, tokens: &[Token]) -> usize {
        let end = tokens
            .iter()
            .position(|token| token.is_mark(';'))
            .unwrap_or(tokens.len());
        for (path, name) in leaves(&[], &tokens[..end]) {
            let Some(path) = self.in_file(&path) else {
                continue;
            };
            if let Some(name) = name {
                let key = (self.file.clone(), name);
                self.modules.imports.insert(key, path.clone());
            }
            self.modules.paths.insert((self.file.clone(), path));
        }
        end
    }
}

/// Returns the paths of a tree of imports after `prefix`, each with the name that it declares. A
/// glob declares none.
fn leaves(prefix: &[String], tokens: &[Token]) -> Vec<(Path, Option<String>)> {
    let mut path = prefix.to_vec();
    let mut index = 0;
    while let Some(token) = tokens.get(index) {
        match token {
            Token::Mark('{') => {
                let inner = &tokens[index + 1..tokens.len() - 1];
                let branches = branches(inner).into_iter();
                return branches.flat_map(|b| leaves(&path, b)).collect();
            }
            Token::Mark('*') => return vec![(path, None)],
            Token::Name(word) if word == "as" => {
                let name = tokens.get(index + 1).and_then(Token::name);
                return vec![(path, name.map(str::to_owned))];
            }
            Token::Name(word) if word == "self" && !path.is_empty() => {}
            Token::Name(word) => path.push(word.clone()),
            _ => {}
        }
        index += 1;
    }
    let name = path.last().cloned();
    vec![(path, name)]
}

/// Splits the tokens between braces at the commas.
fn branches(tokens: &[Token]) -> Vec<&[Token]> {
    let mut branches = Vec::new();
    let (mut start, mut depth) = (0, 0_usize);
    for (index, token) in tokens.iter().enumerate() {
        match token {
            Token::Mark('{') => depth += 1,
            Token::Mark('}') => depth = depth.saturating_sub(1),
            Token::Mark(',') if depth == 0 => {
                branches.push(&tokens[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    branches.push(&tokens[start..]);
    branches.retain(|branch| !branch.is_empty());
    branches
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the arrows of a crate that has the rooms `a` to `d` and `files`.
    fn arrows(files: &[(&str, &str)]) -> String {
        let mut modules = Modules::default();
        for room in ["a", "b", "c", "d"] {
            modules.add(&[&format!("{room}.rs")], "");
        }
        for (file, text) in files {
            let path: Vec<&str> = file.split('/').collect();
            modules.add(&path, text);
        }
        let mut found = Vec::new();
        for (from, to) in modules.arrows() {
            found.extend(to.into_keys().map(|to| format!("{from}-{to}")));
        }
        found.join(" ")
    }

    #[test]
    fn imports_and_paths_are_arrows() {
        assert_eq!(arrows(&[("a.rs", "use crate::b::X;")]), "a-b");
        let tree = "use crate::{b::{self, X}, c::Y as Z, d::*, std::io};";
        assert_eq!(arrows(&[("a.rs", tree)]), "a-b a-c a-d");
        assert_eq!(arrows(&[("a.rs", "fn f() -> crate::b::X { todo }")]), "a-b");
        assert_eq!(arrows(&[("a.rs", "m! { x: crate::c::f() }")]), "a-c");
        assert_eq!(arrows(&[("a.rs", "use std::b; fn b() {}")]), "");
    }

    #[test]
    fn super_and_self_are_resolved() {
        assert_eq!(arrows(&[("a/x.rs", "use super::super::b::X;")]), "a-b");
        assert_eq!(arrows(&[("a/x.rs", "use super::b::X;")]), "");
        assert_eq!(arrows(&[("a/mod.rs", "use super::b::X;")]), "a-b");
        assert_eq!(arrows(&[("a.rs", "use self::b::X;")]), "");
    }

    #[test]
    fn paths_in_inline_modules_are_resolved() {
        let with_inner = |code| {
            let text = format!("mod inner {{ {code} }} use super::c::Y;");
            arrows(&[("a.rs", &text)])
        };
        assert_eq!(with_inner("use super::b::X;"), "a-c");
        assert_eq!(with_inner("use super::super::b::X;"), "a-b a-c");
        assert_eq!(with_inner("fn f() { super::super::d::f() }"), "a-c a-d");
    }

    #[test]
    fn reexports_are_followed() {
        let reexport = ("b.rs", "pub(crate) use crate::c::X;");
        assert_eq!(arrows(&[reexport, ("a.rs", "use crate::b::X;")]), "a-c b-c");
        let renamed = ("b.rs", "pub use crate::c::X as Y;");
        assert_eq!(arrows(&[renamed, ("a.rs", "use crate::b::Y;")]), "a-c b-c");
        let root = ("lib.rs", "pub use d::X;");
        assert_eq!(arrows(&[root, ("a.rs", "use crate::X;")]), "a-d");
        let module = ("b/mod.rs", "pub(crate) use inner::X;");
        let inner = ("b/inner.rs", "pub use crate::d::X;");
        let user = ("a.rs", "use crate::b; fn f(x: b::X) {}");
        assert_eq!(arrows(&[module, inner, user]), "a-b a-d b-d");
    }

    #[test]
    fn paths_in_tests_are_ignored() {
        assert_eq!(arrows(&[("a/tests.rs", "use crate::b::X;")]), "");
        assert_eq!(arrows(&[("a/x_tests.rs", "use crate::b::X;")]), "");
        let inline = "#[cfg(test)] mod tests { use crate::b::X; } use crate::c::Y;";
        assert_eq!(arrows(&[("a.rs", inline)]), "a-c");
    }
}
