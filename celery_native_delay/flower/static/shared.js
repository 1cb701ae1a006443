/* What our pages have in common. jQuery and moment are Flower's own. */
/*global $, moment */

var delaysShared = (function () {
    "use strict";

    var asked = document.querySelector("[data-timezone]").dataset.timezone,
        zone = moment.tz.zone(asked) ? asked : "UTC",       // as Flower's own pages
        // What a terminal or a reader would obey instead of showing it: C0, C1, bidirectional, unseen.
        OBEYED = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
        FOCUSABLE = "a, button, input",
        held = null;            // row and place of the focus in a table, while it is drawn again

    function visible(text) {
        return String(text === null || text === undefined ? "" : text).replace(OBEYED, function (char) {
            return "\\u" + ("000" + char.charCodeAt(0).toString(16)).slice(-4);
        });
    }

    function escapeHtml(text) {
        return $("<i>").text(visible(text)).html().replace(/"/g, "&quot;");
    }

    // By itself: what is written from right to left does not turn what stands beside it.
    function isolated(text) {
        return "<bdi>" + escapeHtml(text).replace(/\./g, ".<wbr>") + "</bdi>";
    }

    function number(value) {
        return value === null || value === undefined ? "\u2014" : Number(value).toLocaleString("en");
    }

    function clock(us) {
        return moment(us / 1000).tz(zone).format("YYYY-MM-DD HH:mm:ss z");
    }

    function iso(us) {
        return new Date(us / 1000).toISOString();
    }

    function timeTag(us, before) {
        return '<time datetime="' + iso(us) + '" title="' + iso(us) + '">' + (before || "") + clock(us) + "</time>";
    }

    function duration(seconds) {
        var parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]],
            rest = Math.floor(seconds), words = [];
        parts.forEach(function (part) {
            var count = Math.floor(rest / part[0]);
            rest -= count * part[0];
            if (count && words.length < 2) {
                words.push(count + " " + part[1]);
            }
        });
        return words.join(" ") || Math.round(seconds * 1000) + " ms";
    }

    function inWords(us) {
        var seconds = Math.round((us / 1000 - Date.now()) / 1000);
        if (!seconds) {
            return "now";
        }
        return seconds < 0 ? duration(-seconds) + " ago" : "in " + duration(seconds);
    }

    function sayWhy(xhr) {
        var body = xhr.responseJSON;
        if (body && body.error) {
            return body.error;
        }
        return xhr.status ? "Flower answered " + xhr.status + ": " + (xhr.responseText || xhr.statusText)
            .replace(/<[^>]*>/g, " ").trim().slice(0, 300) : "Flower does not answer";
    }

    function live(is) {
        $("#delays-dot").toggleClass("status-dot-live", is).toggleClass("status-dot-error", !is);
        document.getElementById("delays-live").textContent = is ? "Live" : "No answer";
    }

    function noteFocus() {
        var row = document.activeElement && document.activeElement.closest(".tasks-table tbody tr");
        held = row && [row.id, $(row).find(FOCUSABLE).index(document.activeElement)];
    }

    function giveFocusBack() {
        var row = held && document.getElementById(held[0]),
            found = row && $(row).find(FOCUSABLE)[held[1]];
        if (found) {
            found.focus({preventScroll: true});
        }
    }

    return {
        zone: zone, escapeHtml: escapeHtml, isolated: isolated, number: number, clock: clock, iso: iso,
        timeTag: timeTag, duration: duration, inWords: inWords, sayWhy: sayWhy, live: live,
        noteFocus: noteFocus, giveFocusBack: giveFocusBack
    };
}());
