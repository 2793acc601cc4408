//! Prometheus scrapes `iwarp stat serve` while perftest transfers data, and answers the queries of
//! the dashboard `packaging/grafana/iwarp.json`.

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::checks::expect;
use super::stage::Stage;
use crate::case::{Case, Verdict};

/// The dashboard.
const DASHBOARD: &str = include_str!("../../../packaging/grafana/iwarp.json");
/// How often Prometheus scrapes.
const INTERVAL: &str = "200ms";
/// What stands for Grafana's `$__rate_interval`.
const RATE_INTERVAL: &str = "2s";

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new(
            "prometheus",
            "`iwarp stat serve` during `ib_write_bw`",
            scrape,
        )
        .needs(&["perftest", "prometheus"])
        .busy_polls()
        .limit(120),
    ]
}

fn scrape(stage: &Stage) -> Result<Verdict> {
    let (stat, web, traffic) = (stage.port()?, stage.port()?, stage.port()?);
    let directory = stage.dir().join("stat");
    std::fs::create_dir(&directory)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&directory, mode)?;
    let directory = directory.display().to_string();
    let bind = format!("127.0.0.1:{stat}");
    let iwarp = stage.command_path();
    let server = ["stat", "serve", "--bind", &bind, "--directory", &directory];
    let _server = stage.start_plain(&[&[iwarp.as_str()][..], &server].concat())?;
    stage.wait_for_port(stat)?;
    let _prometheus = start_prometheus(stage, stat, web)?;

    let traffic_port = traffic.to_string();
    let bandwidth = [
        "ib_write_bw",
        "-R",
        "-d",
        "iwarp0",
        "-D",
        "12",
        "-p",
        &traffic_port,
    ];
    let variables = [("IWARP_STAT", directory.as_str())];
    let passive = stage.start_with(&[], None, &variables, &bandwidth)?;
    stage.wait_for_port(traffic)?;
    let active = [&bandwidth[..], &["127.0.0.1"]].concat();
    let active = stage.start_with(&[], None, &variables, &active)?;

    let queries = Queries { stage, web };
    // Prometheus has seen the queue pairs twice.
    queries.until("sum(rate(iwarp_queue_pair_sent_bytes_total[2s])) > 1e6")?;
    let both = queries.values("count(iwarp_queue_pair_info{state=\"RTS\"})")?;
    // Each end has another connection, by which perftest exchanges its parameters.
    if both != ["4"] {
        bail!("{both:?} queue pairs are in RTS instead of 4");
    }
    let panels = queries.dashboard()?;
    let said = active.success()?;
    passive.success()?;
    expect(&said, "BW average")?;
    Ok(Verdict::passed(format!(
        "{panels} queries of the dashboard"
    )))
}

fn start_prometheus(stage: &Stage, stat: u16, web: u16) -> Result<super::program::Program> {
    let file = stage.dir().join("prometheus.yml");
    let text = format!(
        "global:\n  scrape_interval: {INTERVAL}\n  scrape_timeout: {INTERVAL}\n\
         scrape_configs:\n  - job_name: iwarp\n    static_configs:\n      \
         - targets: ['127.0.0.1:{stat}']\n"
    );
    std::fs::write(&file, text)?;
    let config = format!("--config.file={}", file.display());
    let data = format!("--storage.tsdb.path={}", stage.dir().join("data").display());
    let listen = format!("--web.listen-address=127.0.0.1:{web}");
    let prometheus = stage.start_plain(&["prometheus", &config, &data, &listen])?;
    stage.wait_for_port(web)?;
    Ok(prometheus)
}

/// Asks Prometheus by `promtool`.
struct Queries<'a> {
    stage: &'a Stage,
    web: u16,
}

impl Queries<'_> {
    /// Returns the result of a query: a sample per element.
    fn ask(&self, query: &str) -> Result<Vec<Value>> {
        let address = format!("http://127.0.0.1:{}", self.web);
        let promtool = [
            "promtool", "query", "instant", "-o", "json", &address, query,
        ];
        let said = self.stage.start_plain(&promtool)?.success();
        let said = said.with_context(|| format!("the query {query}"))?;
        let result = serde_json::from_str(&said).with_context(|| format!("{query}: {said}"))?;
        Ok(result)
    }

    fn values(&self, query: &str) -> Result<Vec<String>> {
        let samples = self.ask(query)?;
        let value = |sample: &Value| sample["value"][1].as_str().map(str::to_owned);
        Ok(samples.iter().filter_map(value).collect())
    }

    /// Waits until a query has a result.
    fn until(&self, query: &str) -> Result<()> {
        while self.ask(query)?.is_empty() {
            if self.stage.time_left().is_zero() {
                bail!("{query} has no result");
            }
        }
        Ok(())
    }

    /// Asks all queries of the dashboard. Returns their number.
    fn dashboard(&self) -> Result<usize> {
        let dashboard: Value = serde_json::from_str(DASHBOARD)?;
        let panels = dashboard["panels"].as_array().context("panels")?;
        let targets = panels
            .iter()
            .filter_map(|panel| panel["targets"].as_array());
        let mut count = 0;
        for target in targets.flatten() {
            let query = target["expr"].as_str().context("a query")?;
            let mut asked = query.replace("$__rate_interval", RATE_INTERVAL);
            for variable in ["$job", "$instance", "$pid"] {
                asked = asked.replace(variable, ".*");
            }
            if asked.contains('$') {
                bail!("{query} has an unknown variable");
            }
            if self.ask(&asked)?.is_empty() {
                bail!("{query} has no result");
            }
            count += 1;
        }
        Ok(count)
    }
}
