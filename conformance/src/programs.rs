//! Unmodified programs of the distribution: their command lines and their expected output. They are
//! the rows of two matrices: with siw, and with our kernel module.

use anyhow::{Context as _, Result, bail};

use crate::guest::Output;

/// A program and the command lines of its server and its client. `{addr}`, `{port}` and `{device}`
/// are placeholders.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) server: String,
    pub(crate) client: String,
    /// Message sizes. The client must print a result for each.
    pub(crate) sizes: Vec<u32>,
    pub(crate) rules: Rules,
}

/// How to run a program, and how to check its output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Texts that the client's output must contain.
    pub(crate) client_prints: &'static [&'static str],
    /// Texts that the output of neither end may contain.
    pub(crate) forbidden: &'static [&'static str],
    /// The server does not exit by itself.
    pub(crate) server_stays: bool,
    /// The program supports IPv6.
    pub(crate) ipv6: bool,
    /// Only our module's matrix runs it; siw's matrix has enough similar rows.
    pub(crate) module_only: bool,
    /// The kernel's siw supports what the program needs.
    pub(crate) siw: bool,
    /// The program needs kernel modules that Debian's kernel package omits, and that we do not
    /// build for all kernels.
    pub(crate) needs_rebuilt_modules: bool,
    /// Time limit in a virtual machine, in seconds.
    pub(crate) limit: u64,
    /// A shell script that runs before the program, at the client's end.
    pub(crate) before_client: &'static str,
    /// A shell script that runs after the program, at the server's end.
    pub(crate) after: &'static str,
}

/// Time limit of most programs in a virtual machine, in seconds.
pub(crate) const LIMIT: u64 = 60;
/// Time limit of a program that tries many sizes, in seconds.
const LONG: u64 = 300;

const PLAIN: Rules = Rules {
    client_prints: &[],
    forbidden: &["mismatch"],
    server_stays: false,
    ipv6: true,
    module_only: false,
    siw: true,
    needs_rebuilt_modules: false,
    limit: LIMIT,
    before_client: "true",
    after: "true",
};
/// Rules for a server that does not exit by itself.
pub(crate) const STAYS: Rules = Rules {
    server_stays: true,
    ..PLAIN
};
const MORE: Rules = Rules {
    module_only: true,
    ..PLAIN
};

/// A row of the table: name, server, client, rules.
type Row = (&'static str, &'static str, &'static str, Rules);

/// Rules for kernel storage. Scripts of the guest set the server up and shut it down.
const STORAGE_RULES: Rules = Rules {
    server_stays: true,
    limit: LONG,
    ..PLAIN
};

/// Kernel storage. The scripts read the data back and compare checksums.
const STORAGE: &[Row] = &[
    (
        "nvme",
        "nvme-target serve {addr} {port} 32",
        "nvme-disk use {addr} {port}",
        Rules {
            before_client: "nvme-disk disconnect 2>/dev/null || true",
            after: "nvme-target down disk",
            ..STORAGE_RULES
        },
    ),
    (
        "nfs-4.2",
        "nfs-server serve {port}",
        "nfs-disk use {addr} {port} 4.2",
        NFS,
    ),
    (
        "nfs-3",
        "nfs-server serve {port}",
        "nfs-disk use {addr} {port} 3",
        NFS,
    ),
    (
        "smb",
        "smb-server serve {port}",
        "smb-disk use {addr} {port}",
        Rules {
            // ksmbd accepts RDMA connections on IPv4 only.
            ipv6: false,
            needs_rebuilt_modules: true,
            before_client: "umount /mnt 2>/dev/null || true; rm -rf /tmp/tree",
            after: "smb-server down",
            ..STORAGE_RULES
        },
    ),
    (
        "rnbd",
        "rnbd-server serve {port} 32",
        "rnbd-disk use {addr} {port}",
        Rules {
            // rtrs writes with immediate data, which siw refuses.
            siw: false,
            needs_rebuilt_modules: true,
            before_client: "rnbd-disk unmap 2>/dev/null || true",
            after: "rnbd-server down",
            ..STORAGE_RULES
        },
    ),
    (
        "iser",
        "iser-target serve {addr} {port} 96",
        "iser-disk use {addr} {port}",
        Rules {
            after: "iser-target down iqn.2024-01.example:target",
            ..STORAGE_RULES
        },
    ),
];
const NFS: Rules = Rules {
    before_client: "umount /mnt 2>/dev/null || true; rm -rf /tmp/tree",
    after: "nfs-server down",
    ..STORAGE_RULES
};

/// Programs of rdma-core and libfabric, and qperf.
const PROGRAMS: &[Row] = &[
    (
        "rping",
        "rping -s -a {addr} -p {port} -C 10 -S 64 -V",
        "rping -c -a {addr} -p {port} -C 10 -S 64 -V",
        PLAIN,
    ),
    (
        "rping-65000",
        "rping -s -a {addr} -p {port} -C 3 -S 65000 -V",
        "rping -c -a {addr} -p {port} -C 3 -S 65000 -V",
        PLAIN,
    ),
    (
        "rping-4096",
        "rping -s -a {addr} -p {port} -C 10 -S 4096 -V",
        "rping -c -a {addr} -p {port} -C 10 -S 4096 -V",
        MORE,
    ),
    (
        "rping -v",
        "rping -s -a {addr} -p {port} -C 10 -v",
        "rping -c -a {addr} -p {port} -C 10 -v",
        Rules {
            client_prints: &["ping data: rdma-ping-9"],
            ..MORE
        },
    ),
    (
        // A client would call rdma_establish(), which the kernel's rdma_cm refuses for RNICs.
        "rping -q (server)",
        "rping -s -a {addr} -p {port} -C 10 -V -q",
        "rping -c -a {addr} -p {port} -C 10 -V",
        MORE,
    ),
    (
        "rping -P",
        "rping -s -P -a {addr} -p {port}",
        "rping -c -a {addr} -p {port} -C 10 -V",
        Rules {
            server_stays: true,
            ..MORE
        },
    ),
    (
        "ucmatose",
        "ucmatose -b {addr} -p {port} -c 3 -C 5 -S 1000",
        "ucmatose -s {addr} -p {port} -c 3 -C 5 -S 1000",
        PLAIN,
    ),
    (
        "ucmatose -m",
        "ucmatose -b {addr} -p {port} -c 10 -C 10 -m",
        "ucmatose -s {addr} -p {port} -c 10 -C 10 -m",
        Rules {
            client_prints: &["data transfers complete", "return status 0"],
            ..MORE
        },
    ),
    (
        "cmtime",
        "cmtime -b {addr} -p {port}",
        "cmtime -s {addr} -p {port} -c 50",
        Rules {
            client_prints: &["create qp", "disconnect", "destroy"],
            forbidden: &["event:", "failure", "error"],
            server_stays: true,
            ..MORE
        },
    ),
    (
        "rdma_client",
        "rdma_server -s {addr} -p {port}",
        "rdma_client -s {addr} -p {port}",
        PLAIN,
    ),
    (
        "rdma_xclient",
        "rdma_xserver -p {port} -c r",
        "rdma_xclient -s {addr} -p {port} -c r",
        Rules {
            // The server listens on IPv4 only.
            ipv6: false,
            ..PLAIN
        },
    ),
    (
        "rstream",
        "rstream -b {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
        "rstream -s {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
        PLAIN,
    ),
    (
        "rstream-64",
        "rstream -b {addr} -p {port} -S 64 -C 1 -I 100 -T v",
        "rstream -s {addr} -p {port} -S 64 -C 1 -I 100 -T v",
        PLAIN,
    ),
    (
        // A polling client would treat the end of the connection (POLLHUP) as an error before it
        // has read the remaining data.
        "rstream -T a (server)",
        "rstream -b {addr} -p {port} -S 65536 -C 20 -I 5 -T a",
        "rstream -s {addr} -p {port} -S 65536 -C 20 -I 5",
        Rules {
            client_prints: &["usec/xfer"],
            ..MORE
        },
    ),
    (
        "riostream",
        "riostream -b {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
        "riostream -s {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
        Rules {
            client_prints: &["usec/xfer"],
            ..MORE
        },
    ),
    (
        "rcopy",
        "rcopy -p {port}",
        "rcopy /tmp/iwarp-source {addr}:/tmp/iwarp-copy -p {port}",
        Rules {
            server_stays: true,
            // rcopy parses the first colon as the start of the path.
            ipv6: false,
            before_client: "seq 400000 > /tmp/iwarp-source",
            after: "seq 400000 | cmp - /tmp/iwarp-copy && rm /tmp/iwarp-copy",
            ..MORE
        },
    ),
    (
        // The other tests of RDMA Write use immediate data, which siw does not support.
        "qperf -cm1",
        "qperf -lp {port}",
        "qperf -lp {port} -cm1 -t 1 {addr} rc_bw rc_bi_bw rc_lat \
         rc_rdma_write_poll_lat rc_rdma_read_bw rc_rdma_read_lat",
        Rules {
            server_stays: true,
            ipv6: false,
            // siw refuses queue pairs without a send queue, which qperf's receivers use.
            siw: false,
            client_prints: &[
                "rc_bw:",
                "rc_bi_bw:",
                "rc_lat:",
                "rc_rdma_write_poll_lat:",
                "rc_rdma_read_bw:",
                "rc_rdma_read_lat:",
            ],
            forbidden: &["errors", "failed"],
            limit: LONG,
            ..MORE
        },
    ),
    (
        // Without `-d`, the server uses the first device, which the client may not reach.
        "fi_pingpong verbs",
        "fi_pingpong -B {port} -p verbs -e msg -S all -I 5 -c {device}",
        "fi_pingpong -P {port} -p verbs -e msg -S all -I 5 -c {device} {addr}",
        Rules {
            ipv6: false,
            client_prints: &["\n6m "],
            limit: LONG,
            ..MORE
        },
    ),
    (
        "fi_pingpong verbs;ofi_rxm",
        "fi_pingpong -B {port} -p verbs;ofi_rxm -e rdm -S all -I 5 -c {device}",
        "fi_pingpong -P {port} -p verbs;ofi_rxm -e rdm -S all -I 5 -c {device} {addr}",
        Rules {
            ipv6: false,
            client_prints: &["\n6m "],
            limit: LONG,
            ..MORE
        },
    ),
];

/// Programs of perftest. With `-R` they use IPv4 only.
const PERFTEST: &[&str] = &[
    "ib_write_bw",
    "ib_read_bw",
    "ib_send_bw",
    "ib_write_lat",
    "ib_read_lat",
    "ib_send_lat",
];
/// Programs of perftest that can wait for completion events (`-e`).
const EVENTS: &[&str] = &["ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"];

/// Size of the messages whose latency is measured, in bytes.
const SHORT: u32 = 64;

/// Returns the command line of a perftest server. The client's command line is the same, followed
/// by the address.
pub(crate) fn perftest_words(name: &str, size: u32, rounds: u32) -> String {
    // The default send queue depth exceeds the number of messages in the shortest test, 10.
    let depth = if name.ends_with("_bw") { " -t 8" } else { "" };
    format!("{name} -R -F -p {{port}} -s {size} -n {rounds}{depth} {{device}}")
}

fn perftest(name: String, words: String, sizes: Vec<u32>, module_only: bool) -> Program {
    let rules = Rules {
        ipv6: false,
        module_only,
        limit: if sizes.len() > 1 { LONG } else { LIMIT },
        ..PLAIN
    };
    Program {
        name,
        client: format!("{words} {{addr}}"),
        server: words,
        sizes,
        rules,
    }
}

/// Returns a perftest program that measures one message size.
pub(crate) fn measurement(name: &str, size: u32, rounds: u32) -> Program {
    let words = perftest_words(name, size, rounds);
    perftest(format!("{name}-{size}"), words, vec![size], false)
}

/// Like [`measurement`], for a machine with one processor. Where perftest can, it waits for events
/// instead of polling: a polling end would keep the other end from running until the scheduler
/// interrupts it. It cannot for Writes, so one is on its way at a time instead if they are short.
pub(crate) fn waiting_measurement(name: &str, size: u32, rounds: u32) -> Program {
    let mut words = perftest_words(name, size, rounds);
    if EVENTS.contains(&name) {
        words += " -e";
    } else if size <= SHORT {
        words = words.replace(" -t 8", " -t 1");
    }
    perftest(format!("{name}-{size}"), words, vec![size], false)
}

fn programs(rows: &[Row]) -> Vec<Program> {
    rows.iter()
        .map(|&(name, server, client, rules)| Program::new(name, (server, client), rules))
        .collect()
}

pub(crate) fn storage() -> Vec<Program> {
    programs(STORAGE)
}

/// Returns a storage measurement. `transport` is prepended to the command lines of both ends.
pub(crate) fn storage_measurement(name: &str, client: &str, transport: &str) -> Program {
    let (server, rules) = if client.starts_with("nfs") {
        ("nfs-server serve {port}", NFS)
    } else {
        ("nvme-target serve {addr} {port} 0", STORAGE[0].3)
    };
    let ends = [server, client].map(|words| format!("{transport}{words}"));
    Program::new(name, (&ends[0], &ends[1]), rules)
}

/// Returns the rows of our module's matrix, or of siw's matrix.
pub(crate) fn all(module_only: bool) -> Vec<Program> {
    let mut all = programs(PROGRAMS);
    for name in PERFTEST {
        let bandwidth = name.ends_with("_bw");
        let sizes: &[u32] = if bandwidth {
            &[2, 4096, 65536, 1 << 20]
        } else {
            &[2, 64, 65536, 1 << 20]
        };
        for &size in sizes {
            let rounds = if size >= 1 << 20 { 10 } else { 100 };
            all.push(measurement(name, size, rounds));
        }
        let mut option = |option: &str, rounds: u32, sizes: Vec<u32>| {
            let depth = if bandwidth { " -t 4" } else { "" };
            let words = format!("{name} -R -F -p {{port}} {option} -n {rounds}{depth} {{device}}");
            all.push(perftest(format!("{name} {option}"), words, sizes, true));
        };
        option("-a", 5, (1..=23).map(|power| 1 << power).collect());
        if EVENTS.contains(name) {
            let size = if bandwidth { 65536 } else { 2 };
            option("-e", 100, vec![size]);
        }
        if bandwidth {
            option("-q 8", 20, vec![65536]);
            option("-b", 100, vec![65536]);
        }
    }
    all.retain(|program| module_only || !program.rules.module_only);
    all
}

impl Program {
    pub(crate) fn new(name: &str, (server, client): (&str, &str), rules: Rules) -> Self {
        Self {
            name: name.to_owned(),
            server: server.to_owned(),
            client: client.to_owned(),
            sizes: Vec::new(),
            rules,
        }
    }

    /// Checks the output of both ends, and returns the client's result for the last size.
    ///
    /// Fails if an end printed a forbidden text, or the client did not print a required text or a
    /// result.
    pub(crate) fn check(&self, server: &Output, client: &Output) -> Result<String> {
        for text in [&server.text, &client.text] {
            if text.contains("verify") && text.contains("fail") {
                bail!("{text}");
            }
            if let Some(word) = self
                .rules
                .forbidden
                .iter()
                .find(|word| text.contains(**word))
            {
                bail!("forbidden text {word:?} in the output: {text}");
            }
        }
        if let Some(word) = self
            .rules
            .client_prints
            .iter()
            .find(|word| !client.text.contains(**word))
        {
            bail!(
                "the text {word:?} is missing in the client's output: {}",
                client.text
            );
        }
        let mut note = String::new();
        for size in &self.sizes {
            note = perftest_result(&client.text, &self.name, *size).with_context(|| {
                format!(
                    "no result for message size {size} in the client's output: {}",
                    client.text
                )
            })?;
        }
        Ok(note)
    }
}

/// Returns the average bandwidth in MB/s or the typical latency in microseconds, with its unit.
pub(crate) fn perftest_result(text: &str, name: &str, size: u32) -> Option<String> {
    let row: Vec<&str> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first().and_then(|word| word.parse().ok()) == Some(size))?;
    // Columns of a row: size, rounds, then peak and average, or minimum, maximum and typical.
    if name.contains("_bw") {
        row.get(3)
            .map(|perftest_result| format!("{perftest_result} MB/s"))
    } else {
        row.get(4)
            .map(|perftest_result| format!("{perftest_result} us"))
    }
}
